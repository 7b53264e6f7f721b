"""Decodes are rows: planned together, every step is the one that a plan of all sequences, each by itself, comes to."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.running_batch import RunningBatch
from decode_worker.scheduler import Beside, StepPlan
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from shell.clock import Deadline
from shell.telemetry.events import Events
from tandem.types import ChoiceSpec, GroupSpec, Handle, RequestId, SamplingParams, TokenId
from tests.decode_rows import feeds_of, seqs_of
from tests.heard_router import HeardRouter
from tests.manual_clock import ManualClock
from worker.admission import Forecast
from worker.budget import ChunkBudget
from worker.releases import BlockReleases
from worker.request import Request
from worker.source import BatchedStep

END = TokenId(9)
BLOCK_SIZE = 4


class PlainBatch(RunningBatch):
    """Every plan is of all."""

    def _plan(self, chunk_tokens: int, sitting_out: Collection[Sequence] = ()) -> tuple[StepPlan, Beside | None]:
        return self._planned(self._running, chunk_tokens, sitting_out), None


class World:
    """A batch and its requests, by number, driven as the step loop does, up to two steps in flight.

    The cache knows nothing: what it evicts first depends on the order of allocations within a step, which is free.
    """

    def __init__(self, batch: type[RunningBatch], num_blocks: int, max_seqs: int, *, with_prompts: bool) -> None:
        """`with_prompts`: whether a step may be behind one with prompts, and have prompts itself."""
        self.with_prompts = with_prompts
        self.cache = PrefixCache(BlockPool(num_blocks, BLOCK_SIZE), enabled=False)
        pool = self.cache.pool
        self.batch = batch(self.cache, max_seqs, Forecast(pool, 4), ChunkBudget(8), BlockReleases(pool))
        self.in_flight: deque[BatchedStep] = deque()
        self.draws: list[tuple[int, int]] = []
        """Of the newest step: whose each is."""

    def arrive(self, number: int, num_prompt_tokens: int, sampling: SamplingParams, n: int, emitted: int) -> None:
        choices = tuple(ChoiceSpec(index, (TokenId(1),) * emitted) for index in range(n))
        prompt = tuple(TokenId(1 + number % 2) for _ in range(num_prompt_tokens))
        spec = GroupSpec(RequestId(f"r{number}"), prompt, sampling, choices)
        deadline = Deadline.after(ManualClock(), None)
        self.batch.join(Request(HeardRouter(), Handle(number), spec, number, 0.0, deadline, Events()))

    def release(self, number: int) -> None:
        for request in [each for each in self.batch._requests if each.handle == number]:
            self.batch.leave(request)

    def launch(self) -> object:
        """Plans a step; returns what it is, whatever objects and blocks it is made of."""
        if self.in_flight:
            batched = self.batch.step_behind(self.in_flight[-1], with_prompts=self.with_prompts)
        else:
            batched = self.batch.next_step()
        if batched is None:
            return None
        self.batch.releases.step_launched()
        check_rows(batched)
        before, self.draws = self.draws, []
        told = {}
        step = batched.step
        for (request, seq), chunk, feed in zip(batched.seqs, seqs_of(step), feeds_of(step), strict=True):
            fed_by = None if feed < 0 else before[feed]
            draws = [(spec.params.temperature, spec.params.seed, spec.output_index) for spec in chunk.samples]
            blocks = -(-(chunk.context_len + len(chunk.token_ids)) // BLOCK_SIZE)
            assert len(seq.block_table) >= blocks
            told[request.handle, seq.index] = (chunk.token_ids, chunk.context_len, draws, fed_by)
            self.draws += [(request.handle, each.index) for each in seq.drawers for _ in chunk.samples[:1]]
        self.in_flight.append(batched)
        return told, len(batched.rows), batched.num_prompt_tokens

    def end(self, salt: int) -> None:
        """The oldest step ends; what it draws depends on who draws, and on `salt`."""
        batched = self.in_flight.popleft()
        self.cache.step_ended(failed=False)
        self.batch.releases.step_ended()
        for (request, seq), chunk in zip(batched.seqs, seqs_of(batched.step), strict=True):
            if request in self.batch and not seq.is_finished:
                self.apply(request, seq, chunk, salt)
        self.cache.check_invariants()

    def apply(self, request, seq, scheduled, salt) -> None:
        group = request.group
        seq.step_ended(scheduled)
        ends_prefix = not group.is_forked and (bool(scheduled.samples) or seq.is_computed)
        for choice in seq.drawers if scheduled.samples else ():
            rng = random.Random(f"{request.handle} {choice.index} {choice.num_output_tokens} {salt}")
            choice.append_token(END if rng.random() < 0.05 else TokenId(1))
        if ends_prefix:
            group.fork(self.cache.pool)
            group.follow(self.cache)
        if group.is_finished:
            self.batch.leave(request)
        elif seq.is_finished:
            self.batch.choice_ended(request, seq)


def check_rows(batched: BatchedStep) -> None:
    """A seq is a row if it decodes, else a chunk; its row says what its sequence does."""
    assert all(request.group.is_forked and seq.num_remaining_tokens == 1 for request, seq in batched.rows)
    rows = batched.step.rows
    assert (rows is None) is (not batched.rows)
    if rows is None:
        return
    assert all(spec.params.presence_penalty and spec.history is not None for _, spec in rows.draws.extras)
    assert [number for number, _ in rows.draws.extras] == [
        number for number, (_, seq) in enumerate(batched.rows) if seq.params.presence_penalty
    ]
    for (_, seq), table in zip(batched.rows, rows.tables.tolist(), strict=True):
        assert table[: len(seq.block_table)] == list(seq.block_table)[: len(table)]


def sampling_of(rng: random.Random) -> SamplingParams:
    penalty = rng.choice((0.0, 0.0, 0.0, 0.5))
    temperature, seed = rng.choice((0.0, 0.7)), rng.randrange(9)
    return SamplingParams(
        max_tokens=rng.randint(1, 24), temperature=temperature, seed=seed, presence_penalty=penalty,
        end_token_ids=frozenset({END}),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_steps_planned_together_are_those_of_plain_plans(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, max_seqs = rng.choice((24, 48, 200)), rng.choice((4, 8))
    with_prompts = rng.random() < 0.5
    worlds = [World(kind, num_blocks, max_seqs, with_prompts=with_prompts) for kind in (RunningBatch, PlainBatch)]
    for number in range(60):
        if rng.random() < 0.4:
            arrival = (rng.randint(1, 12), sampling_of(rng), rng.choice((1, 1, 1, 3)), rng.choice((0, 0, 2)))
            arrival = (*arrival[:3], min(arrival[3], arrival[1].max_tokens - 1))
            for world in worlds:
                world.arrive(number, *arrival)
        if rng.random() < 0.05:
            gone = rng.randint(0, number)
            for world in worlds:
                world.release(gone)
        for _ in range(rng.randint(1, 3)):
            if len(worlds[0].in_flight) < 2:
                found, expected = (world.launch() for world in worlds)
                assert found == expected
            if worlds[0].in_flight and rng.random() < 0.7:
                for world in worlds:
                    world.end(seed)
        assert worlds[0].cache.pool.counts() == worlds[1].cache.pool.counts()
