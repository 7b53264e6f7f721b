"""An engine that keeps tokens where a model would keep KV, for tests of the decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from engine.beam import BeamSearch, num_candidates
from engine.block_pool import BlockPool
from engine.draws import SampleSpec
from engine.step import (
    BrokenLogits,
    Direction,
    DrawnTokens,
    Sampled,
    SampledToken,
    ScheduledSeq,
    Step,
    StepResult,
    TierMove,
)
from tandem.errors import InternalError
from tandem.lifecycle import BlockState
from tandem.types import Candidates, GroupSpec, TokenId, TokenLogprobs
from tests.decode_rows import feeds_of, seqs_of

VOCAB_SIZE = 1000
WAIT_S = 10.0


def next_token(token_ids: Sequence[int], seed: int = 0) -> TokenId:
    """The fake model: depends on every token, its position, and the seed."""
    state = 7 + seed
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 99991
    return TokenId(state % VOCAB_SIZE)


def candidates(token_ids: Sequence[int], count: int) -> Candidates:
    """The fake model's best next tokens for a beam: as different as the tokens before them."""
    best = next_token(token_ids)
    step = 0.2 + best % 7 * 0.05
    found = ((TokenId((best + 37 * rank) % VOCAB_SIZE), -step * (rank + 1)) for rank in range(count))
    return tuple((token_id, float(np.float32(logprob))) for token_id, logprob in found)


def expected_tokens(spec: GroupSpec, index: int = 0) -> list[TokenId]:
    """Whole completion of one choice that the fake model gives."""
    if spec.sampling.beam_width:
        return [each.token_id for each in _searched(spec).best(index).tokens]
    tokens = list(spec.prompt_token_ids)
    while len(tokens) < spec.max_total_tokens:
        tokens.append(next_token(tokens, spec.sampling.of_choice(index).seed))
        if tokens[-1] in spec.sampling.end_token_ids:
            break
    return tokens[spec.num_prompt_tokens :]


def _searched(spec: GroupSpec) -> BeamSearch:
    search, beams = BeamSearch(spec.sampling), [spec.prompt_token_ids]
    while not search.is_done:
        drawn = [candidates(tokens, num_candidates(spec.sampling)) for tokens in beams]
        beams = [(*beams[parent], token_id) for parent, token_id in search.advance(drawn)]
    return search


def drawn_of(outputs: Sequence[Sequence[Sampled]]) -> DrawnTokens:
    """What the draws of a step come to that brought these, seq after seq."""
    drawn = [sampled for output in outputs for sampled in output]
    token_ids = [TokenId(-1) if isinstance(each, BrokenLogits) else each[0].token_id for each in drawn]
    more = {number: each for number, each in enumerate(drawn) if not isinstance(each, BrokenLogits)}
    return DrawnTokens(token_ids, {number: each for number, each in more.items() if each[0].logprobs is not None})


def is_fed(step: Step) -> bool:
    return step.continues or any(feed >= 0 for feed in feeds_of(step))


class FakeEngine:
    """Keeps a token per slot where a model would keep KV, and samples from what it finds there.

    INVARIANT, checked: from launch to end, no block of a step is freed, and no block changes its owner. At most two
    steps are in flight, and a fed step directly follows the one that feeds it.
    """

    def __init__(self, pool: BlockPool, *, is_asynchronous: bool = False) -> None:
        self.is_asynchronous = is_asynchronous
        self.slots: dict[tuple[int, int], int] = {}
        self.rows: dict[int, dict[int, int]] = {}
        """Of the host tier: tokens by offset."""
        self.num_steps = 0
        self.step_s = 0.0
        """How long it says that a step took: 0 = the next one is launched behind it at once."""
        self.errors: dict[int, Exception] = {}
        """What steps raise, by their number from 0."""
        self.breaks: tuple[int, int] | None = None
        """Seed of the sequences whose logits are broken, and the output from which on."""
        self.steps: list[Step] = []
        self.max_in_flight = 0
        self._pool = pool
        self._may_end = asyncio.Event()
        self._may_end.set()
        self._num_allowed = 0
        self._last: asyncio.Task[StepResult] | None = None
        self._last_drawn: list[TokenId] | None = None
        self._news = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        return len(self.steps) - self.num_steps

    def hold(self) -> None:
        """Lets no step end until `let_go`, but those that `allow` names."""
        self._may_end.clear()

    def let_go(self) -> None:
        self._may_end.set()

    def allow(self, num_steps: int = 1) -> None:
        """Lets that many steps end while held."""
        self._num_allowed += num_steps
        self._may_end.set()

    async def until_launched(self, num_steps: int) -> None:
        """Waits until so many steps were launched."""
        async with asyncio.timeout(WAIT_S):
            while len(self.steps) < num_steps:
                self._news.clear()
                await self._news.wait()

    def put(self, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """What a hand-off would bring."""
        for position, token_id in enumerate(token_ids):
            size = self._pool.block_size
            self.slots[block_ids[position // size], position % size] = token_id

    def launch(self, step: Step) -> asyncio.Task[StepResult]:
        assert step.chunks or step.rows is not None
        assert self.num_in_flight < 2
        assert self.num_in_flight or not is_fed(step)
        self.steps.append(step)
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        seqs = [
            (seq._replace(block_table=tuple(seq.block_table)), feed)
            for seq, feed in zip(seqs_of(step), feeds_of(step), strict=True)
        ]
        reads_loaded = self.num_in_flight > 1 and any(move.direction is Direction.IN for move in self.steps[-2].moves)
        run = self._run(len(self.steps) - 1, step, seqs, self._last, reads_loaded=reads_loaded)
        self._last = asyncio.create_task(run)
        self._news.set()
        return self._last

    async def _run(
        self,
        number: int,
        step: Step,
        seqs: list[tuple[ScheduledSeq, int]],
        before: asyncio.Task[StepResult] | None,
        *,
        reads_loaded: bool,
    ) -> StepResult:
        named = {*(b for seq, _ in seqs for b in seq.block_table), *(c.source for c in step.copies)}
        generations = {block: self._pool.generations((block,))[0] for block in named}
        assert not {copy.target for copy in step.copies} & {copy.source for copy in step.copies}
        if before is not None:
            await asyncio.wait({before})
        await self._may_end.wait()
        if self._num_allowed:
            self._num_allowed -= 1
            if not self._num_allowed:
                self._may_end.clear()
        self.num_steps += 1
        self._news.set()
        for block, generation in generations.items():
            assert self._pool.state(block) is BlockState.LIVE, "freed under the engine"
            assert self._pool.generations((block,))[0] == generation, "freed under the engine"
        if number in self.errors or ((reads_loaded or is_fed(step)) and self._last_drawn is None):
            self._last_drawn = None
            raise self.errors.get(number, InternalError("the step before it failed"))
        return self._compute_all(step, seqs)

    def _compute_all(self, step: Step, seqs: list[tuple[ScheduledSeq, int]]) -> StepResult:
        self._move(step.moves)
        for copy in step.copies:
            for offset in range(self._pool.block_size):
                if (copy.source, offset) in self.slots:
                    self.slots[copy.target, offset] = self.slots[copy.source, offset]
        outputs = tuple(self._compute(*each) for each in seqs)
        drawn = drawn_of(outputs)
        self._last_drawn = list(drawn.token_ids)
        return StepResult(outputs[len(seqs) - len(step.chunks) :], self.step_s, drawn=drawn)

    def _move(self, moves: Sequence[TierMove]) -> None:
        offsets = range(self._pool.block_size)
        for move in moves:
            if move.direction is Direction.OUT:
                self.rows[move.row] = {at: self.slots[move.block, at] for at in offsets}
        for move in moves:
            if move.direction is Direction.IN:
                self.slots.update({(move.block, at): self.rows[move.row][at] for at in offsets})

    def _compute(self, seq: ScheduledSeq, feed: int) -> tuple[Sampled, ...]:
        token_ids, table = list(seq.token_ids), seq.block_table
        if feed >= 0:
            assert self._last_drawn is not None
            assert token_ids[-1] == 0
            token_ids[-1] = self._last_drawn[feed]
        end, size = seq.context_len + len(token_ids), self._pool.block_size
        where = [(table[p // size], p % size) for p in range(end)]
        for slot, token_id in zip(where[seq.context_len :], token_ids, strict=True):
            self.slots[slot] = token_id
        known = [self.slots[slot] for slot in where]
        return tuple(self._draw(known, sample) for sample in seq.samples)

    def _draw(self, token_ids: list[int], sample: SampleSpec) -> Sampled:
        seed = sample.params.seed
        if self.breaks is not None and seed == self.breaks[0] and sample.output_index >= self.breaks[1]:
            return BrokenLogits()
        if sample.num_candidates:
            found = candidates(token_ids, sample.num_candidates)
            return tuple(SampledToken(token_id, TokenLogprobs(token_id, logprob)) for token_id, logprob in found)
        return (SampledToken(next_token(token_ids, seed), None),)
