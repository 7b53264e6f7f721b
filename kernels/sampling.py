"""The door of drawing tokens on a device: one token per row of logits, with no sort and no wait for the host.

The semantics are `engine.sampler`'s; a device without an implementation is served by that.
Dimensions: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class DrawParams:
    """What the tokens of R rows depend on besides the logits; tensors `[R]` on the logits' device."""

    temperature: torch.Tensor
    """Float32; 0 takes the best token, the first among equals."""
    top_k: torch.Tensor
    """Int32; 0 keeps all."""
    top_p: torch.Tensor
    """Float64; 1 keeps all."""
    min_p: torch.Tensor
    """Float32; 0 keeps all."""
    seed: torch.Tensor
    """Int64 whose 64 bits are the generator's key."""
    output_index: torch.Tensor
    """Int64: the first two words of the counter; the last two are 0."""


class RowMaximum(Protocol):
    """Finds the greatest value of each row by the fastest means of the device."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[R, V]` of the model's dtype → lowest indices `[R]` int64 of their maxima.

        -1 where the row holds NaN or has no finite maximum.
        """


class Sampler(Protocol):
    """Draws tokens; all state is in the arguments. Nothing synchronizes: CUDA graphs can capture both calls."""

    def draw(self, logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
        """Returns one token id per row, `[R]` int64, or -1 where the row holds NaN or has no finite maximum.

        `logits` `[R, V]` float32, any stride over R, stay as they are.
        """

    def best_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws like `draw` with temperature 0 in every row, at a fraction of the launches."""
