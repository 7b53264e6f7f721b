"""Which sequences compute how many tokens in the next step: continuous batching, as a pure function.

Every sequence has a rank, larger priority first, then order of arrival; ranks differ. One step:

 1. admit     waiting sequences that hold blocks (landed hand-offs) take free seats; then, in
              rank order, those without blocks (fresh or preempted prompts) for whose tokens
              there is room *and* head-room
 2. share     a sequence with one token to compute takes it (decode); all others share
              `chunk_tokens` of prompt among them
 3. secure    in rank order, each gets the blocks its tokens need; when the pool is dry the
              last-ranked holder of blocks is preempted: it loses its blocks and later computes
              its tokens again. Who finds no victim behind it takes fewer tokens, or sits out

Nothing is preempted for a sequence ranked behind it. So the first-ranked sequence is never
preempted and takes what all others hold: it always gets on, unless blocks are away on
hand-offs, which end by themselves (see `reservations`).

Knows no clock, no pool and no engine: block counts in, decisions out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine.chunking import plan_chunks

Rank = tuple[int, int]
"""Smaller goes first: `(-priority, arrival number)`."""


class Schedulable(Protocol):
    """What a plan must know of a sequence."""

    @property
    def rank(self) -> Rank:
        """Its place in line; no two are equal."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and completion."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV lies in its blocks; less than `num_tokens`."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks it holds."""
        ...


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds one step."""

    block_size: int
    max_seqs: int
    chunk_tokens: int
    """Prompt tokens per step; decode tokens do not count."""
    headroom_tokens: int = 32
    """Growth to keep free for each active sequence when another is let in."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def headroom_blocks(self, num_active: int) -> int:
        """Blocks to leave free when `num_active` sequences may grow; none for one that is alone."""
        return 0 if num_active <= 1 else num_active * self.blocks_for(self.headroom_tokens)

    def missing_blocks(self, seqs: Iterable[Schedulable]) -> int:
        """Blocks that these still need for the tokens they already have."""
        return sum(max(0, self.blocks_for(seq.num_tokens) - seq.num_blocks) for seq in seqs)


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[S]):
    """Decisions of one step, to be carried out in the order of the fields."""

    admitted: tuple[S, ...]
    """Leave waiting for running."""
    preempted: tuple[S, ...]
    """Lose their blocks and go (back) to waiting."""
    scheduled: tuple[tuple[S, int], ...]
    """Who computes how many tokens, each at least one; one-token seqs first, each part in rank order."""


def plan_step(running: Sequence[S], waiting: Sequence[S], free_blocks: int, limits: StepLimits) -> StepPlan[S]:
    """Plans one step; arguments are in rank order and are not changed.

    The plan allocates no more than `free_blocks` plus the blocks of those it preempts.
    """
    return _Planner(running, waiting, free_blocks, limits).plan()


class _Planner(Generic[S]):
    """Working state of one `plan_step`."""

    def __init__(self, running: Sequence[S], waiting: Sequence[S], free_blocks: int, limits: StepLimits) -> None:
        self._running = list(running)
        self._waiting = list(waiting)
        self._free_blocks = free_blocks
        self._limits = limits
        self._preempted: list[S] = []
        self._victims: list[S] | None = None

    def plan(self) -> StepPlan[S]:
        admitted = self._admit() if self._waiting else []
        decodes, chunks = self._secure(self._share())
        return StepPlan(tuple(admitted), tuple(self._preempted), (*decodes, *chunks))

    def _admit(self) -> list[S]:
        """Moves from waiting to running as far as seats and blocks go."""
        admitted = []
        for seq in [*(s for s in self._waiting if s.num_blocks), *(s for s in self._waiting if not s.num_blocks)]:
            if len(self._running) >= self._limits.max_seqs or not (seq.num_blocks or self._has_room_for(seq)):
                break
            self._waiting.remove(seq)
            self._running.append(seq)
            admitted.append(seq)
        self._running.sort(key=_rank)
        return admitted

    def _has_room_for(self, seq: S) -> bool:
        """Whether all its tokens and the head-room fit beside what the running ones still lack."""
        spare = self._free_blocks - self._limits.missing_blocks(self._running)
        headroom = self._limits.headroom_blocks(len(self._running) + 1)
        return spare >= self._limits.blocks_for(seq.num_tokens) + headroom

    def _share(self) -> list[tuple[S, int, bool]]:
        """Tokens that each would compute if blocks were no matter, and whether it is a chunk; in rank order."""
        remaining = [seq.num_tokens - seq.num_computed_tokens for seq in self._running]
        prompts = [num_tokens for num_tokens in remaining if num_tokens > 1]
        chunks = iter(plan_chunks(prompts, self._limits.chunk_tokens, len(prompts)))
        return [
            (seq, next(chunks), True) if num_tokens > 1 else (seq, 1, False)
            for seq, num_tokens in zip(self._running, remaining, strict=True)
        ]

    def _secure(self, wanted: list[tuple[S, int, bool]]) -> tuple[list[tuple[S, int]], list[tuple[S, int]]]:
        """Gives out blocks in rank order, preempting from the other end; returns decodes and chunks."""
        decodes: list[tuple[S, int]] = []
        chunks: list[tuple[S, int]] = []
        for seq, num_wanted, is_chunk in wanted:
            if self._preempted and seq.rank >= self._preempted[-1].rank:
                break  # preempted, or behind a victim whose blocks it must not take
            num_tokens = self._grow(seq, num_wanted)
            if num_tokens > 0:
                (chunks if is_chunk else decodes).append((seq, num_tokens))
        return decodes, chunks

    def _grow(self, seq: S, num_wanted: int) -> int:
        """Takes blocks for up to `num_wanted` more tokens; returns for how many there is room."""
        num_computed, num_blocks = seq.num_computed_tokens, seq.num_blocks
        end = num_computed + num_wanted
        num_needed = self._limits.blocks_for(end) - num_blocks
        if num_needed <= 0:
            return num_wanted
        while num_needed > self._free_blocks and self._preempt_behind(seq):
            pass
        num_taken = min(num_needed, self._free_blocks)
        self._free_blocks -= num_taken
        return min(end, (num_blocks + num_taken) * self._limits.block_size) - num_computed

    def _preempt_behind(self, seq: S) -> bool:
        """Takes the blocks of the last-ranked holder, if that ranks behind `seq`."""
        if self._victims is None:
            holders = [s for s in (*self._running, *self._waiting) if s.num_blocks]
            self._victims = sorted(holders, key=_rank)
        if not self._victims or self._victims[-1].rank <= seq.rank:
            return False
        victim = self._victims.pop()
        self._preempted.append(victim)
        self._free_blocks += victim.num_blocks
        return True


def _rank(seq: Schedulable) -> Rank:
    return seq.rank
