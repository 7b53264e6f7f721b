"""One step's tensors on a device, placed as `engine.step_layout` laid them, and the seam to the decoder.

Torch is entered once per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.draws import Draws
from engine.graph_shapes import GraphShape
from engine.prompt_scores import ScorePlan
from engine.step import DecodeRows, ScheduledSeq
from engine.step_layout import ShapeOf, StepLayout, lay_out
from engine.upload import packed_bytes, unpack, upload, upload_packed
from kernels.attention import AttentionMetadata
from kernels.compiled_step import StepInputs
from kernels.group import Group, SoloGroup

_ALONE = SoloGroup()


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """A step's inputs as a graph reads them, but for the block tables."""

    shape: GraphShape
    packed: torch.Tensor
    """`[bytes]` uint8: `GraphShape.empty_inputs`, filled. The batch's own tensors are the used parts of it."""


@dataclass(frozen=True, slots=True)
class Feeds:
    """Tokens of a batch that the step before draws: F of them."""

    tokens: torch.Tensor
    """`[F]` int64: indices into T."""
    draws: torch.Tensor
    """`[F]` int64: numbers of draws of the step before."""
    history: dict[int, int]
    """For each of this step's draws whose penalties must see a fed token: by which draw of the step before it comes."""

    def put(self, drawn_ids: torch.Tensor, token_ids: torch.Tensor, group: Group = _ALONE) -> None:
        """Copies what the step before drew, `[D']` int64 with -1 for broken rows, into `token_ids` `[T]`, here and on
        the other ranks of `group`.
        """
        fed = drawn_ids.index_select(0, self.draws).clamp_(min=0)  # a broken seq's next token is not kept
        token_ids.index_copy_(0, self.tokens, group.broadcast(fed))


@dataclass(frozen=True, slots=True)
class Batch:
    """What the decoder and the sampler read in one step; B seqs, T tokens, R rows of logits, D ≥ R draws."""

    token_ids: torch.Tensor
    """`[T]` int64, seq after seq; 0 in the place of tokens still to be fed."""
    positions: torch.Tensor
    """`[T]` int64: absolute position of each token in its seq."""
    metadata: AttentionMetadata
    sample_rows: torch.Tensor
    """`[R]` int64, ascending: the tokens, as indices into T, whose logits are wanted; each once."""
    draws: Draws
    """D of them."""
    draw_rows: torch.Tensor | None
    """`[D]` int64: the row of each draw, as an index into R; None if draw i is from row i."""
    num_rows: int
    """Number of decodes: the first seqs, each with a single draw."""
    num_draws: tuple[int, ...]
    """Number of draws of each chunk."""
    feeds: Feeds | None
    scores: ScorePlan | None = None
    """Given if known tokens are to be scored."""
    graph: GraphInputs | None = None
    """Given if a graph serves the step."""


class Forward(Protocol):
    """`models.decoder.Decoder`, or a fake."""

    def forward(self, step: StepInputs) -> torch.Tensor:
        """Stores KV of the step's tokens; returns logits `[R, V]` of its rows."""

    def hidden(self, step: StepInputs) -> torch.Tensor:
        """Runs `forward` without the last projection: returns `[R, E]`."""

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, E]` of `hidden` → logits `[R, V]`, in memory that the caller may write."""


def build_batch(
    chunks: Sequence[ScheduledSeq],
    block_size: int,
    device: torch.device,
    rows: DecodeRows | None = None,
    shape_of: ShapeOf | None = None,
) -> Batch:
    """Lays out and places a step; see `lay_out`."""
    return place(lay_out(chunks, block_size, rows, shape_of), device)


def place(layout: StepLayout, device: torch.device) -> Batch:
    """Copies a step to `device`; on a CPU its tensors share memory with `layout`."""
    part = layout.part
    (tokens, at, slot_mapping, sampled_at, starts, lens), (drawn_at, fed_at, feeds, tables), graph = _placed(
        layout, device
    )
    metadata = AttentionMetadata(
        cu_seqlens_q=starts,
        seq_lens=lens,
        block_tables=tables,
        slot_mapping=slot_mapping,
        query_lens_host=part.query_lens,
        seq_lens_host=tuple(part.seq_lens.tolist()),
    )
    return Batch(
        token_ids=tokens,
        positions=at,
        metadata=metadata,
        sample_rows=sampled_at,
        draws=part.draws,
        draw_rows=None if part.draw_rows is None else drawn_at,
        num_rows=layout.num_rows,
        num_draws=layout.num_draws,
        feeds=Feeds(fed_at, feeds, layout.fed_histories) if len(fed_at) else None,
        scores=None if layout.scores is None else layout.scores.placed(device),
        graph=graph,
    )


def _placed(
    layout: StepLayout, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor], GraphInputs | None]:
    """Returns a step's inputs on `device`: those of `GraphShape.empty_inputs`, the others, and both as a graph's."""
    part, inputs, shape = layout.part, layout.inputs, layout.shape
    draw_rows = np.zeros(0, np.int64) if part.draw_rows is None else part.draw_rows
    others = (draw_rows, layout.fed, layout.fed_by, np.ascontiguousarray(part.tables))
    if shape is None:
        tensors = upload((*inputs, *others), device)
        return tensors[: len(inputs)], tensors[len(inputs) :], None
    padded = shape.padded(inputs)
    packed = upload_packed((*padded, *others), device)
    tensors = unpack(packed, (*padded, *others))
    used = [tensor[: len(array)] for tensor, array in zip(tensors, inputs, strict=False)]
    return used, tensors[len(inputs) :], GraphInputs(shape, packed[: packed_bytes(padded)])
