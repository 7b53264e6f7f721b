"""An engine that keeps tokens where a model would keep KV, for tests of the prefill worker; and gates to hold it up."""

from __future__ import annotations

import asyncio

from engine.step import (
    BrokenLogits,
    Direction,
    Sampled,
    SampledToken,
    ScheduledSeq,
    ScoredTokens,
    Scores,
    Step,
    StepResult,
    TierMove,
)
from tandem.types import BlockId, TokenId, TokenLogprobs

BLOCK_SIZE = 4
DEADLINE_S = 20.0


class Gate:
    """Open by default; while closed, `passed` waits. Counts who came to it."""

    def __init__(self) -> None:
        self._is_open = True
        self._num_permits = 0
        self._changed = asyncio.Condition()
        self.num_arrived = 0

    def close(self) -> None:
        self._is_open = False

    async def open(self) -> None:
        async with self._changed:
            self._is_open = True
            self._changed.notify_all()

    async def let_one_pass(self) -> None:
        async with self._changed:
            self._num_permits += 1
            self._changed.notify_all()

    async def passed(self) -> None:
        async with self._changed:
            self.num_arrived += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._is_open or self._num_permits > 0)
            self._num_permits = max(0, self._num_permits - 1)

    async def reached(self, num: int = 1) -> None:
        """Returns once `num` callers in all have come to the gate."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: self.num_arrived >= num)


class FakeEngine:
    """Samples the sum of the prompt's last token, its length and the drawer's seed; each step takes half a second.

    Keeps a token per slot where a model would keep KV. INVARIANT, checked: what a step reads was computed, of the
    one prompt that `make_spec` makes all prompts of.
    """

    def __init__(self, *, is_asynchronous: bool = False) -> None:
        self.is_asynchronous = is_asynchronous
        self.gate = Gate()
        self.num_steps = 0
        self.step_s = 0.5
        self.slots: dict[tuple[BlockId, int], TokenId] = {}
        self.rows: dict[int, list[TokenId]] = {}
        """The host tier."""
        self.batches: list[tuple[ScheduledSeq, ...]] = []
        self.error: Exception | None = None
        self.broken_length: int | None = None
        """Length of the prompts whose logits are broken."""
        self.broken_score = TokenId(0)
        """A token before which logits are broken."""

    def launch(self, step: Step) -> asyncio.Task[StepResult]:
        self.batches.append(step.chunks)
        return asyncio.create_task(self._run(step, [tuple(seq.block_table) for seq in step.chunks]))

    async def _run(self, step: Step, tables: list[tuple[BlockId, ...]]) -> StepResult:
        await self.gate.passed()
        self.num_steps += 1
        if self.error is None:
            self._move(step.moves)
        for seq, table in zip(step.chunks, tables, strict=True):
            self._compute(seq, table)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        scored = {number: self._score(seq.scored) for number, seq in enumerate(step.chunks) if seq.scored is not None}
        return StepResult(tuple(self._sample(seq) for seq in step.chunks), self.step_s, scored)

    def _score(self, scored: ScoredTokens) -> Scores:
        """Each by its own id."""
        if self.broken_score in scored.token_ids:
            return BrokenLogits()
        return tuple(TokenLogprobs(each, -float(each)) for each in scored.token_ids)

    def _move(self, moves: tuple[TierMove, ...]) -> None:
        for each in moves:
            if each.direction is Direction.OUT:
                self.rows[each.row] = [self.slots[each.block, offset] for offset in range(BLOCK_SIZE)]
        for each in moves:
            if each.direction is Direction.IN:
                self.slots.update({(each.block, offset): self.rows[each.row][offset] for offset in range(BLOCK_SIZE)})

    def _compute(self, seq: ScheduledSeq, table: tuple[BlockId, ...]) -> None:
        where = [(block, offset) for block in table for offset in range(BLOCK_SIZE)]
        assert self.error is not None or all(self.slots[where[at]] == token_at(at) for at in range(seq.context_len))
        for number, token_id in enumerate(seq.token_ids):
            self.slots[where[seq.context_len + number]] = token_id if self.error is None else TokenId(0)

    def _sample(self, seq: ScheduledSeq) -> tuple[Sampled, ...]:
        if seq.context_len + len(seq.token_ids) == self.broken_length:
            return (BrokenLogits(),) * len(seq.samples)
        return tuple((SampledToken(first_token(seq, sample.params.seed), None),) for sample in seq.samples)


def token_at(position: int) -> TokenId:
    """Of all prompts, the one a piece of the other."""
    return TokenId(1 + position % 50)


def first_token(seq: ScheduledSeq, seed: int = 0) -> TokenId:
    return TokenId(seq.token_ids[-1] + seq.context_len + len(seq.token_ids) + seed)
