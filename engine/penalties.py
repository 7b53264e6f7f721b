"""What changes logits before temperature: penalties, biases, the ban on ending too early, token masks.

In this order, each from the row's own parameters:

    repetition   logit / r if positive else logit * r, for each id of prompt or completion
                 (Keskar et al., CTRL, 2019; r on both signs as in transformers)
    presence     logit - a, for each id of the completion
    frequency    logit - b * count, for each id of the completion
    bias         logit + logit_bias[id]
    min_tokens   -inf for the end ids while fewer tokens than that have been sampled
    mask         -inf for every token whose bit is 0 (`engine.step.TokenMask`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.step import SampleSpec, TokenMask
from engine.upload import upload
from tandem.errors import InternalError
from tandem.types import SamplingParams

_MASK_WORD_BITS = 32


def changes_logits(spec: SampleSpec) -> bool:
    """Whether `adjust` would do anything."""
    return bool(spec.params.logit_bias or spec.output_index < spec.params.min_tokens or reads_output(spec.params))


def reads_output(params: SamplingParams) -> bool:
    """Whether `adjust` looks at the completion so far."""
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)


def adjust(row: torch.Tensor, spec: SampleSpec) -> None:
    """Changes one row of logits `[V]` in place."""
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = _to(np.unique(np.array(spec.prompt_token_ids + spec.output_token_ids, dtype=np.int64)), row)
        logits = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
    if (params.presence_penalty or params.frequency_penalty) and spec.output_token_ids:
        ids, counts = np.unique(np.array(spec.output_token_ids, dtype=np.int64), return_counts=True)
        loss = params.presence_penalty + params.frequency_penalty * counts
        row[_to(ids, row)] -= _to(loss, row).to(row.dtype)
    if params.logit_bias:
        bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        row[_to(np.array(list(params.logit_bias), dtype=np.int64), row)] += _to(bias, row).to(row.dtype)
    if spec.output_index < params.min_tokens and params.end_token_ids:
        row[_to(np.array(sorted(params.end_token_ids), dtype=np.int64), row)] = -torch.inf


def _to(values: npt.NDArray[np.generic], row: torch.Tensor) -> torch.Tensor:
    """On the row's device, without waiting for it."""
    return upload((values,), row.device)[0]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may be drawn, for M of a step's draws."""

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
            shifts = torch.arange(_MASK_WORD_BITS, dtype=torch.int32, device=losses.device)
            bits = (losses[:, :, None] >> shifts) & 1  # [M, W, 32]
            losses = torch.where(bits.view(len(self.draws), -1) > 0, 0.0, -torch.inf)
        vocab_size = logits.shape[1]
        if not 0 <= losses.shape[1] - vocab_size < _MASK_WORD_BITS:
            raise InternalError(f"token masks of {losses.shape[1]} bits for a vocabulary of {vocab_size}")
        for number, loss in zip(self.draws, losses, strict=True):
            logits[number].add_(loss[:vocab_size])
