"""The sequences that were let in, running or waiting, and the blocks they hold.

Carries out what `scheduler.plan_step` decides: takes blocks from the pool, gives them back.
Between `begin_step` and `end_step` the engine reads and writes the blocks of the step's
sequences; one that leaves meanwhile keeps its blocks until `end_step`.

Does not know routers, hand-offs, clocks or the engine.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from decode_worker.arrival import Arrival
from decode_worker.resident import Resident
from decode_worker.scheduler import StepLimits, StepPlan, plan_step
from engine.block_pool import BlockPool
from engine.step import ScheduledSeq


@dataclass(frozen=True, slots=True)
class Share:
    """One resident's part of a step."""

    resident: Resident
    num_tokens: int
    scheduled: ScheduledSeq


class Roster:
    """Running and waiting residents, each list in rank order."""

    def __init__(self, pool: BlockPool, limits: StepLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._residents: dict[Arrival, Resident] = {}
        self._running: list[Resident] = []
        self._waiting: list[Resident] = []
        self._in_step: frozenset[Resident] = frozenset()
        self._leaving: list[Resident] = []
        self._num_preemptions = 0

    def __len__(self) -> int:
        return len(self._residents)

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents.values())

    @property
    def num_running(self) -> int:
        """Residents with a seat in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Residents without one."""
        return len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        """How often blocks were taken from a resident."""
        return self._num_preemptions

    @property
    def missing_blocks(self) -> int:
        """Blocks that residents still lack for the tokens they have."""
        return self._limits.missing_blocks(self._residents.values())

    @property
    def num_prompt_tokens_left(self) -> int:
        """Tokens to compute before all residents are decoding."""
        return sum(r.sequence.num_remaining_tokens - 1 for r in self._residents.values())

    @property
    def is_settled(self) -> bool:
        """Whether nobody is here, and the engine reads nobody's blocks."""
        return not self._residents and not self._in_step

    def join(self, resident: Resident) -> None:
        """Lets it wait for its first step here; it brings its blocks, if it has any."""
        self._residents[resident.arrival] = resident
        self._account(resident, 0)
        bisect.insort(self._waiting, resident, key=lambda waiting: waiting.rank)

    def leave(self, arrival: Arrival) -> Resident | None:
        """Takes it out and frees its blocks, now or when the step that uses them has ended.

        None = it was not here.
        """
        resident = self._residents.pop(arrival, None)
        if resident is None:
            return None
        (self._running if resident in self._running else self._waiting).remove(resident)
        if resident in self._in_step:
            self._leaving.append(resident)
        else:
            self._free(resident)
        return resident

    def __contains__(self, resident: Resident) -> bool:
        return self._residents.get(resident.arrival) is resident

    def begin_step(self) -> tuple[Share, ...]:
        """Plans a step and makes it so; empty = nobody can get on now.

        From now until `end_step` the blocks of all shares stay as they are.
        """
        plan = plan_step(self._running, self._waiting, self._pool.num_free, self._limits)
        self._reseat(plan)
        shares = tuple(self._share(resident, num_tokens) for resident, num_tokens in plan.scheduled)
        self._in_step = frozenset(share.resident for share in shares)
        return shares

    def advance(self, share: Share) -> None:
        """The step has computed KV for the share's tokens."""
        num_before = share.resident.num_computed_tokens
        share.resident.sequence.advance(share.num_tokens)
        self._account(share.resident, num_before)

    def end_step(self) -> None:
        """The engine has let go; frees what left meanwhile."""
        self._in_step = frozenset()
        leaving, self._leaving = self._leaving, []
        for resident in leaving:
            self._free(resident)

    def _reseat(self, plan: StepPlan[Resident]) -> None:
        for resident in plan.admitted:
            self._waiting.remove(resident)
            bisect.insort(self._running, resident, key=lambda running: running.rank)
        for resident in plan.preempted:
            self._num_preemptions += 1
            resident.arrival.observer.preempted()
            self._free(resident)
            if resident in self._running:
                self._running.remove(resident)
                bisect.insort(self._waiting, resident, key=lambda waiting: waiting.rank)

    def _share(self, resident: Resident, num_tokens: int) -> Share:
        num_blocks = resident.sequence.blocks_wanted(num_tokens, self._limits.block_size)
        if num_blocks:
            resident.sequence.add_blocks(self._pool.allocate(num_blocks))
        return Share(resident, num_tokens, resident.sequence.scheduled(num_tokens))

    def _account(self, resident: Resident, from_token: int) -> None:
        sequence = resident.sequence
        self._pool.set_filled(sequence.block_table, sequence.num_computed_tokens, from_token)

    def _free(self, resident: Resident) -> None:
        self._pool.release(resident.sequence.take_blocks())
