"""Draws in one call: planned, drawn and read as a step does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.draws import Draws, SampleSpec
from engine.history import TokenHistory, distinct
from engine.sampler import draw, plan_draws
from engine.step import Sampled
from kernels.operations import Kernels
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from kernels.sampling import RowMaximum, Sampler
from tandem.types import TokenId


def drawing_kernels(sampler: Sampler | None = None, row_max: RowMaximum | None = None) -> Kernels:
    """Kernels that draw by these."""
    return Kernels(ReferenceBackend(), ReferenceOperations(), sampler, row_max)


def history(prompt: Sequence[int] = (), output: Sequence[int] = ()) -> TokenHistory:
    """Of a choice with these tokens, for any penalty."""
    return TokenHistory(distinct([TokenId(each) for each in prompt]), map(TokenId, output))


TORCH = drawing_kernels()


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec], kernels: Kernels = TORCH) -> list[Sampled]:
    """Draw i from row i of `logits` `[R, V]`."""
    drawn = draw(logits, plan_draws(Draws.of(specs), kernels, logits.device)).fetch(torch.Tensor.cpu).read()
    return [drawn[number] for number in range(len(specs))]
