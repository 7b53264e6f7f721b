"""A step between its phases: `Prepared` before it is launched, `Launched` until its result is collected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.device import Mark
from engine.sampler import Drawn, DrawPlan
from engine.step import TierMove


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step's inputs, on their way to the device."""

    batch: Batch
    plan: DrawPlan | None
    """None if nothing is drawn."""
    moves: tuple[TierMove, ...]
    copies: tuple[torch.Tensor, ...]
    """`[M, 2]` int64 (source, target) each, to be copied one after the other."""
    uploaded: Mark


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on the device. Keeps the inputs, whose memory must not be used again before the step has ended."""

    prepared: Prepared
    drawn_ids: torch.Tensor
    """`[D]` int64 on the device, -1 where logits are broken: what the next step may be fed."""
    fetched: Drawn | None
    """To be read once `ended` was waited for; None if nothing is drawn."""
    began: Mark
    ended: Mark

    def read_ids(self) -> list[int]:
        """Waits for the step, and for no later one; the drawn ids."""
        self.ended.wait()
        return [] if self.fetched is None else self.fetched.token_ids.tolist()
