"""Token masks: which tokens may be drawn, packed 32 to a word (`engine.step.TokenMask`), applied to rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.step import TokenMask
from engine.upload import upload
from tandem.errors import InternalError

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of M of a step's draws."""

    draws: tuple[int, ...]
    words: torch.Tensor
    """`[M, W]` int32 on a GPU, which unpacks them; on a CPU `[M, W * 32]` float32, 0 or -inf."""

    @classmethod
    def of(cls, masks: Sequence[TokenMask | None], device: torch.device) -> TokenMasks | None:
        """`masks` by draw, all of one length; None if no draw has one. Raises InternalError if lengths differ."""
        draws = tuple(number for number, mask in enumerate(masks) if mask is not None)
        if not draws:
            return None
        given = [mask for mask in masks if mask is not None]
        if len({mask.shape for mask in given}) > 1:
            raise InternalError(f"token masks of {sorted({mask.shape for mask in given})} words in one step")
        words = np.stack(given)  # [M, W]
        if device.type == "cpu":
            bits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=1, bitorder="little")  # [M, W * 32]
            return cls(draws, torch.from_numpy(np.where(bits, np.float32(0), np.float32(-np.inf))))
        return cls(draws, upload((words.view(np.int32),), device)[0])

    def apply(self, logits: torch.Tensor) -> None:
        """-inf for every other token in the draws' rows of `logits` `[D, V]` float32. Raises InternalError by width."""
        losses = self.words  # [M, W * 32] in the end
        if losses.dtype == torch.int32:
            shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=losses.device)
            bits = (losses[:, :, None] >> shifts) & 1  # [M, W, 32]
            losses = torch.where(bits.view(len(self.draws), -1) > 0, 0.0, -torch.inf)
        vocab_size = logits.shape[1]
        if not 0 <= losses.shape[1] - vocab_size < _WORD_BITS:
            raise InternalError(f"token masks of {losses.shape[1]} bits for a vocabulary of {vocab_size}")
        for number, loss in zip(self.draws, losses, strict=True):
            logits[number].add_(loss[:vocab_size])
