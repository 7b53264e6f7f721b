"""Which sequences compute how many tokens in the next step: continuous batching, as a pure function.

Every request has a rank, larger priority first, then order of arrival; ranks differ. A request's choices are one
group: admitted, seated and preempted together. A seat is a row of the batch: one for each choice that has not
finished. One step:

 1. admit     waiting groups that hold blocks (received hand-offs) take free seats; then, in rank order, those
              without blocks (new or preempted prompts) for whose tokens there is room and growth (`worker.admission`).
              An overdue one goes by rank, once there is room for it; until then nobody else without blocks is
              admitted
 2. share     a sequence with one token to compute takes it (decode); all others share `chunk_tokens` with the prompts
              that are computed beside for other workers (`worker.plan`)
 3. allocate  in rank order, each gets the blocks that its tokens need, and one more to copy a shared block before
              it writes there; when the pool is dry the last-ranked holder of blocks is preempted: its group loses
              all blocks and is computed again later. With no victim behind it, a sequence takes fewer tokens or none

INVARIANT: a plan allocates at most what is available (free, or known to the cache and held by nobody) and what its
victims alone hold. A block that a victim shares with others is not credited: it stays held. A plan counts as if the
cache knew nothing: a hold on known blocks takes no more of what is available than room for the same tokens.

Nothing is preempted for a group ranked behind it. So the first-ranked group is never preempted and takes what all
others hold; if it has no seat and nothing else can step, the last-ranked running group vacates one, and the next plan
seats it. It always progresses, unless blocks are reserved for hand-offs, which end by themselves or are given up
(`reservations`), or held by prompts that are computed for other workers: these need no seat, hold all their blocks from
the start, are never preempted, and leave when they are handed over or given up (`reservations`).

Reads groups and the counts of pool and cache, changes neither; knows no clock and no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from tandem.types import BlockId
from worker.admission import Forecast, is_overdue
from worker.plan import share_tokens
from worker.request import Request


@dataclass(frozen=True, slots=True)
class Beside:
    """Decodes that take part in the step whatever the plan is, and are planned elsewhere (`decoding`)."""

    requests: Collection[Request]
    num_seats: int
    """Seats of these requests."""
    num_blocks: int
    """The most blocks that these requests take in the step."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decisions of one step, to be carried out in the order of the fields."""

    admitted: tuple[Request, ...]
    """Move from waiting to running."""
    preempted: tuple[Request, ...]
    """Lose their blocks and go (back) to waiting."""
    scheduled: tuple[tuple[Request, Sequence, int], ...]
    """Which sequence computes how many tokens, each at least one; one-token seqs first, each part in rank order."""
    lacks_blocks: bool
    """Whether a sequence got fewer tokens than its share because the pool was dry."""


def _can_step(sequence: Sequence) -> bool:
    """Whether a step launched now could compute anything of use for the sequence."""
    is_blocked = sequence.num_pending_tokens and (sequence.is_exhausted or not sequence.runs_ahead)
    return not is_blocked and not sequence.awaits_mask and sequence.num_remaining_tokens > 0


def _seat_order(request: Request) -> bool:
    """Returns the order of requests that take seats; equal ones go by rank."""
    return not (request.group.holds_blocks or is_overdue(request))


class StepPlanner:
    """Plans a step."""

    def __init__(
        self,
        running: SequenceOf[Request],
        waiting: SequenceOf[Request],
        cache: PrefixCache,
        forecast: Forecast,
        *,
        max_seqs: int,
        chunk_tokens: int,
        beside: Beside | None = None,
        prompts: Iterable[Request] = (),
        sitting_out: Collection[Sequence] = (),
    ) -> None:
        """`running` and `waiting` are in rank order, and `prompts` hold all their blocks. `chunk_tokens`: prompt tokens
        of the step; decode tokens do not count.

        Sequences that cannot take part in a step launched now, and `sitting_out`, are left out. With `beside`, whose
        requests are not among `running`: if the plan preempts or lacks blocks, it is of no use; all are to be planned
        together then.
        """
        self._beside: Collection[Request] = () if beside is None else beside.requests
        self._num_beside_seats = 0 if beside is None else beside.num_seats
        self._num_beside_blocks = 0 if beside is None else beside.num_blocks
        self._prompts = tuple(prompts)
        self._sitting_out = sitting_out
        self._running = list(running)
        self._waiting = list(waiting)
        self._pool = cache.pool
        self._max_seqs = max_seqs
        self._chunk_tokens = chunk_tokens
        self._forecast = forecast
        self._free_blocks = cache.num_available
        self._preempted: list[Request] = []
        self._victims: list[Request] | None = None
        self._copied: Counter[BlockId] = Counter()
        """How many holders of a shared block leave it for a copy of their own."""
        self._lacks_blocks = False

    def plan(self) -> StepPlan:
        """Returns the plan; called once."""
        admitted = self._admit() if self._waiting else []
        self._free_blocks -= self._num_beside_blocks
        if self._free_blocks < 0:
            return StepPlan((), (), (), lacks_blocks=True)
        decodes, chunks = self._allocate(self._share())
        is_stuck = not decodes and not chunks and not self._preempted and not self._beside
        if is_stuck:  # the next in turn lacks blocks: the first in rank does not
            decodes, chunks = self._allocate(self._share(by_rank=True))
        if is_stuck and not decodes and not chunks and not self._preempted:
            self._vacate_seat()
        return StepPlan(tuple(admitted), tuple(self._preempted), (*decodes, *chunks), self._lacks_blocks)

    def _admit(self) -> list[Request]:
        """Moves from waiting to running as far as seats and blocks go."""
        admitted: list[Request] = []
        num_seats = sum(request.group.num_seats for request in self._running) + self._num_beside_seats
        is_short = False  # of blocks, for one that nobody else without blocks may overtake
        for request in sorted(self._waiting, key=_seat_order):
            has_blocks, goes_first = request.group.holds_blocks, is_overdue(request)
            if not has_blocks and goes_first and (is_short or not self._has_room_for(request)):
                is_short = True
                continue
            if num_seats + request.group.num_seats > self._max_seqs:
                break
            if not has_blocks and not goes_first and (is_short or not self._has_room_for(request)):
                break
            num_seats += request.group.num_seats
            self._waiting.remove(request)
            self._running.append(request)
            admitted.append(request)
        self._running.sort(key=lambda each: each.rank)
        return admitted

    def _vacate_seat(self) -> None:
        """Nothing can step: the last-ranked running group leaves its seat to a waiting one that ranks ahead.

        That one holds blocks which nobody behind it may take, so both would wait for ever. A mask comes by itself.
        """
        if any(seq.awaits_mask for each in self._running for seq in each.group.running):
            return
        last = self._running[-1] if self._running else None
        if last is not None and any(each.group.holds_blocks and each.rank < last.rank for each in self._waiting):
            self._preempted.append(last)

    def _has_room_for(self, request: Request) -> bool:
        """Whether all its tokens fit; unless it is alone, also its growth, beside that of all others with blocks."""
        landed = [each for each in self._waiting if each.group.holds_blocks]
        is_alone = not (self._running or self._beside or self._prompts or landed)
        if is_alone or request.group.num_missing_blocks(self._pool) > self._free_blocks:
            return request.group.num_missing_blocks(self._pool) <= self._free_blocks
        others = self._forecast.most_blocks([*self._running, *self._beside], landed)
        return self._forecast.all_blocks(request.group) + others <= self._free_blocks

    def _share(self, *, by_rank: bool = False) -> list[tuple[Request, Sequence, int, bool]]:
        """Tokens that each would compute if blocks were no matter, and whether it is a chunk; in rank order."""
        seqs = [
            (request, seq, seq.num_remaining_tokens)
            for request in (*self._prompts, *self._running)
            for seq in request.group.running
            if _can_step(seq) and seq not in self._sitting_out
        ]
        prompts = [(request, num_tokens) for request, _, num_tokens in seqs if num_tokens > 1]
        chunks = iter(share_tokens(prompts, self._chunk_tokens, by_rank=by_rank))
        return [
            (request, seq, next(chunks), True) if num_tokens > 1 else (request, seq, 1, False)
            for request, seq, num_tokens in seqs
        ]

    def _allocate(
        self, wanted: list[tuple[Request, Sequence, int, bool]]
    ) -> tuple[list[tuple[Request, Sequence, int]], list[tuple[Request, Sequence, int]]]:
        """Gives out blocks in rank order, preempting from the other end; returns decodes and chunks."""
        decodes: list[tuple[Request, Sequence, int]] = []
        chunks: list[tuple[Request, Sequence, int]] = []
        for request, seq, num_wanted, is_chunk in wanted:
            if num_wanted == 0:
                continue  # the budget for chunks is used up
            if self._preempted and request.rank >= self._preempted[-1].rank:
                break  # preempted, or behind a victim whose blocks it must not take
            num_tokens = self._grow(request, seq, num_wanted)
            if num_tokens > 0:
                (chunks if is_chunk else decodes).append((request, seq, num_tokens))
        return decodes, chunks

    def _grow(self, request: Request, seq: Sequence, num_wanted: int) -> int:
        """Takes blocks for up to `num_wanted` more tokens; returns for how many there is room."""
        size = self._pool.block_size
        source = self._shared_block(request, seq)
        num_copies = 0 if source is None else 1
        num_needed = seq.blocks_wanted(num_wanted, size) + num_copies
        if num_needed == 0:
            return num_wanted
        while num_needed > self._free_blocks and self._preempt_behind(request):
            pass
        num_taken = min(num_needed, self._free_blocks)
        self._lacks_blocks |= num_taken < num_needed
        if num_taken < num_copies:
            return 0
        if source is not None:
            self._copied[source] += 1
        self._free_blocks -= num_taken
        num_slots = (len(seq.block_table) + num_taken - num_copies) * size
        return min(num_wanted, num_slots - seq.num_computed_tokens)

    def _shared_block(self, request: Request, seq: Sequence) -> BlockId | None:
        """The block that must be copied before `seq` writes there, if others will still hold it by then."""
        if not request.group.needs_copy(seq, self._pool):
            return None
        block = seq.block_table[seq.num_computed_tokens // self._pool.block_size]
        return block if self._pool.ref_count(block) - self._copied[block] > 1 else None

    def _preempt_behind(self, request: Request) -> bool:
        """Takes the blocks of the last-ranked holder, if that ranks behind `request`."""
        if self._victims is None:
            others = (*self._running, *self._waiting)
            holders = [other for other in others if other.group.holds_blocks]
            self._victims = sorted(holders, key=lambda each: each.rank)
        if not self._victims or self._victims[-1].rank <= request.rank:
            return False
        victim = self._victims.pop()
        self._preempted.append(victim)
        self._free_blocks += victim.group.num_own_blocks(self._pool)
        return True
