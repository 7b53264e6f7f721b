"""One engine step: rows, chunks, block copies and tier moves in, drawn tokens out.

    prepare   any thread    the step's layout in numpy, uploaded beside the step that runs
    launch    engine thread moves out, moves in, copies, KV and logits, draws; on a GPU queued, not awaited
    collect   any thread    waits for the step's end, reads its tokens

A step may be fed by the one launched just before it, on the device; so steps are launched in the order in
which they were prepared. Owns nothing: model, KV cache and host tier are lent to it. It knows no seq beyond the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from engine.batch import Batch, Forward, place
from engine.device import Device, Mark
from engine.graphs import StepGraphs
from engine.host_tier import HostTier
from engine.kv_cache import KvCache
from engine.logprobs import BestTokens
from engine.rank_link import RankStep
from engine.ranks import Ranks
from engine.sampler import Drawn, DrawPlan, draw, plan_draws
from engine.step import BlockCopy, Direction, DrawnTokens, Step, StepResult, TierMove
from engine.step_layout import lay_out
from engine.upload import Array, upload
from kernels.compiled_step import StepInputs
from kernels.group import Group, SoloGroup
from kernels.operations import Kernels
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from tandem.errors import InternalError

_REFERENCE = Kernels(ReferenceBackend(), ReferenceOperations())


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
    for_ranks: RankStep[Array] | None = None
    """What the other ranks of the model compute; None if there are none."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on the device. Keeps the inputs, whose memory must not be used again before the step has ended."""

    prepared: Prepared
    drawn_ids: torch.Tensor
    """`[D]` int64 on the device, -1 where logits are broken: what the next step may be fed."""
    fetched: Drawn | None
    """To be read once `ended` was waited for; None if nothing is drawn."""
    scores: BestTokens | None
    """The fetched scores of known tokens; None if none are scored."""
    began: Mark
    ended: Mark


class Runner:
    """Steps `decoder` over `kv_cache`: through `graphs` where one serves, draws and copies by `kernels`."""

    def __init__(
        self,
        decoder: Forward,
        kv_cache: KvCache,
        kernels: Kernels = _REFERENCE,
        graphs: StepGraphs | None = None,
        tier: HostTier | None = None,
        device: Device | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`device` None: the cache's device. `ranks`: the others that compute the model, this one being rank 0."""
        self._decoder = decoder
        self._graphs = graphs
        self._kernels = kernels
        self._kv = kv_cache.tensor  # [N, L, 2, Hkv, S, D]
        self._blocks = kv_cache.blocks_view  # [N, block_bytes]
        self._tier = tier
        self._ranks = ranks
        self._group: Group = SoloGroup() if ranks is None else ranks.group
        self._block_size = kv_cache.layout.block_size
        self._device = device or Device(self._kv.device)
        self.is_asynchronous = self._device.is_asynchronous
        """Whether a launched step goes on after `launch` has returned."""

    def run(self, step: Step) -> StepResult:
        """All three phases of a step that is not fed."""
        return self.collect(self.launch(self.prepare(step), None))

    def prepare(self, step: Step) -> Prepared:
        """Lays out a step; the seqs' tables have been read when it returns. Raises InternalError if it cannot be."""
        if not step.chunks and step.rows is None:
            raise InternalError("a step without seqs")
        self._check_moves(step)
        with self._device.uploading():
            shape_of = None if self._graphs is None else self._graphs.shape_of
            layout = lay_out(step.chunks, self._block_size, step.rows, shape_of)
            batch, runs = place(layout, self._kv.device), independent_runs(step.copies)
            return Prepared(
                batch=batch,
                plan=self._plan(batch),
                moves=step.moves,
                copies=tuple(self._pairs(copies) for copies in runs),
                uploaded=self._device.mark(),
                for_ranks=None if self._ranks is None else RankStep.of(layout, runs),
            )

    def launch(self, prepared: Prepared, previous: Launched | None) -> Launched:
        """Computes or queues the step behind `previous`, the one launched just before it; None if that failed.

        KV of every scheduled token is written in place. If it raises, nothing of the step runs any more.
        """
        try:
            with torch.inference_mode():
                return self._launch(prepared, previous)
        except BaseException:
            self._device.synchronize()
            raise

    def collect(self, launched: Launched) -> StepResult:
        """Waits for the step's end: its KV is written when this returns, for other streams too (`engine.pool_staging`).

        If it raises, nothing of the step runs any more.
        """
        try:
            launched.ended.wait()
        except BaseException:
            self._device.synchronize()
            raise
        batch, fetched = launched.prepared.batch, launched.fetched
        drawn = DrawnTokens() if fetched is None else fetched.read()
        borders = pairwise(accumulate(batch.num_draws, initial=batch.num_rows))
        outputs = tuple(tuple(drawn[number] for number in range(start, end)) for start, end in borders)
        seconds = launched.ended.seconds_since(launched.began)
        scored = {} if batch.scores is None or launched.scores is None else batch.scores.read(launched.scores)
        return StepResult(outputs, seconds, scored, drawn)

    def _launch(self, prepared: Prepared, previous: Launched | None) -> Launched:
        batch, plan = prepared.batch, prepared.plan
        began = self._device.mark()
        self._device.wait_for(prepared.uploaded)
        with self._on_ranks(prepared):
            if batch.feeds is not None:
                assert previous is not None, "a step is fed by one that failed"
                batch.feeds.put(previous.drawn_ids, batch.token_ids, self._group)
            if self._tier is not None:
                self._tier.move(prepared.moves, self._blocks)
            for pairs in prepared.copies:
                self._kernels.operations.copy_blocks(self._blocks, pairs)
            logits, scores = self._compute(batch)
        fed_ids = None if previous is None else previous.drawn_ids
        drawn = None if plan is None else draw(logits, plan, batch.draw_rows, fed_ids)
        with self._device.downloading():
            return Launched(
                prepared=prepared,
                drawn_ids=batch.sample_rows[:0] if drawn is None else drawn.token_ids,
                fetched=None if drawn is None else drawn.fetch(self._device.to_host),
                scores=None if scores is None else scores.fetch(self._device.to_host),
                began=began,
                ended=self._device.mark(),
            )

    def _on_ranks(self, prepared: Prepared) -> AbstractContextManager[None]:
        """Sent at launch, not before: a step that its feeder fails is prepared, and never launched."""
        if self._ranks is None or prepared.for_ranks is None:
            return nullcontext()
        return self._ranks.in_step(prepared.for_ranks)

    def _compute(self, batch: Batch) -> tuple[torch.Tensor, BestTokens | None]:
        """KV of the step; returns logits `[R, V]` of its draws, and what known tokens score."""
        if batch.graph is not None and self._graphs is not None:
            return self._graphs.run(batch), None
        rows = batch.sample_rows if batch.scores is None else batch.scores.hidden_rows
        inputs = StepInputs(batch.token_ids, batch.positions, self._kv, batch.metadata, rows)
        if batch.scores is None:
            return self._decoder.forward(inputs), None
        hidden = self._decoder.hidden(inputs)  # [U, E]
        scores = batch.scores.score(hidden, self._decoder.project)
        return self._decoder.project(hidden.index_select(0, batch.scores.sample_rows)), scores

    def _plan(self, batch: Batch) -> DrawPlan | None:
        if not len(batch.draws):
            return None
        fed_by = {} if batch.feeds is None else batch.feeds.history
        return plan_draws(batch.draws, self._kernels, self._kv.device, fed_by)

    def _pairs(self, copies: Sequence[BlockCopy]) -> torch.Tensor:
        pairs = np.array([(copy.source, copy.target) for copy in copies], dtype=np.int64)  # [M, 2]
        if (pairs < 0).any() or (pairs >= len(self._blocks)).any():
            raise InternalError(f"a copy of a block beyond the {len(self._blocks)} of the pool")
        return upload((pairs,), self._kv.device)[0]

    def _check_moves(self, step: Step) -> None:
        moved_in = [move.block for move in step.moves if move.direction is Direction.IN]
        if step.moves and self._tier is None:
            raise InternalError("a step moves blocks, but there is no host tier")
        sources = {copy.source for copy in step.copies}
        if len(sources.union(moved_in)) < len(sources) + len(moved_in):
            raise InternalError("a step moves two rows into one block, or copies a block that it moves into")


def independent_runs(copies: Sequence[BlockCopy]) -> list[list[BlockCopy]]:
    """Splits copies, to be made in order, into runs that may be made in any: as few as that order allows."""
    runs: list[list[BlockCopy]] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for copy in copies:
        if not runs or copy.source in targets or copy.target in targets or copy.target in sources:
            runs.append([])
            sources, targets = set(), set()
        runs[-1].append(copy)
        sources.add(copy.source)
        targets.add(copy.target)
    return runs
