"""Who gets blocks next: prompts for other workers, then reservations, as far as there are room and seats.

Holds the line of reservations, and what was learned of growth and of hand-offs. While the prompt whose turn it is lacks
room, no reservation is admitted before it, so that what runs here ends and makes that room; but a reservation that was
overtaken often enough goes before all prompts.
Decides; the worker carries it out. Knows no routers.
"""

from __future__ import annotations

from decode_worker.growth import Growth
from decode_worker.handoff_pace import HandoffPace
from decode_worker.incoming_transfers import IncomingTransfers
from decode_worker.policy import WorkerPolicy
from decode_worker.reservations import ReservationQueue, Room
from decode_worker.running_batch import RunningBatch
from engine.prefix_cache import PrefixCache
from prefill_worker.prompts import Prompts
from worker.ports import StepEngine
from worker.request import Request

MAX_ENDS_PER_SEAT = 16
"""Hand-offs that may be under way for each seat because as many sequences end in the time that they take."""


class Admission:
    """Of one worker."""

    def __init__(
        self,
        policy: WorkerPolicy,
        cache: PrefixCache,
        growth: Growth,
        batch: RunningBatch,
        transfers: IncomingTransfers,
        prompts: Prompts,
        engine: StepEngine,
    ) -> None:
        self.queue = ReservationQueue(cache, growth, policy.max_queued, policy.max_overtakes)
        self._max_seqs = policy.limits.max_seqs
        self._pace = HandoffPace(MAX_ENDS_PER_SEAT * self._max_seqs, policy.first_guess_tokens)
        self._cache = cache
        self._growth = growth
        self._batch = batch
        self._transfers = transfers
        self._prompts = prompts
        self._engine = engine

    def give_up_one(self) -> None:
        """Called at intervals: where nothing goes on for lack of room, one that holds it here goes on elsewhere."""
        is_idle = not self._batch.releases.num_in_flight
        self._transfers.give_up_one(is_in_the_way=self._batch.is_dry and is_idle)
        lacks_room = len(self.queue) or self._prompts.num_in_line or len(self._batch)
        self._prompts.give_up_one(is_stalled=bool(lacks_room) and not len(self._transfers) and is_idle)

    def next_reservation(self) -> Request | None:
        """Starts prompts for others as far as there is room; then takes the next reservation out of the line for which
        there are seats and blocks, unless a prompt waits for these.
        """
        return self._pop_admissible() if self._start_prompts() and len(self.queue) else None

    def handoff_started(self, request: Request) -> None:
        """Its blocks are reserved."""
        self._pace.started(request, self._num_steps())

    def handoff_landed(self, request: Request) -> None:
        """All its blocks are here."""
        self._pace.landed(request, self._num_steps())

    def ended(self, request: Request, *, in_batch: bool, failed: bool) -> None:
        """Forgets it; what a completion came to is remembered."""
        self.queue.discard(request)
        self._pace.forget(request)
        if not in_batch:
            return
        self._pace.ended(len(request.group.sequences))
        for seq in () if failed else request.group.sequences:
            if seq.num_output_tokens:
                self._growth.completed(seq.num_output_tokens)

    def _start_prompts(self) -> bool:
        """False if the next prompt for another worker waits for room that reservations must not take before it."""
        while self._prompts.num_in_line and not self.queue.is_overdue:
            growth = 0
            if self._batch.num_running:
                handoff_steps = round(self._pace.num_steps)
                growth = self._batch.forecast(self._transfers.requests, handoff_steps).most_blocks(handoff_steps)
            started, lacks_room = self._prompts.start_next(self._cache.num_available - growth)
            if not started:
                return not lacks_room
            self.queue.was_overtaken()
        return True

    def _pop_admissible(self) -> Request | None:
        # As many as end while a hand-off takes place are admitted beyond the seats, and some more: no seat stays empty.
        enough = self._max_seqs + round(self._pace.num_ends)
        num_seqs = self._transfers.num_seqs + self._batch.num_running + self._batch.num_waiting
        seats = enough + max(1, enough // 4) - num_seqs
        if seats <= 0:
            return None
        handoff_steps = round(self._pace.num_steps)
        forecast = self._batch.forecast(self._transfers.requests, handoff_steps) if num_seqs else None
        pool = self._cache.pool
        most_blocks = pool.num_blocks - pool.counts().quarantined
        return self.queue.pop_admissible(Room(self._cache.num_available, most_blocks, seats, forecast, handoff_steps))

    def _num_steps(self) -> int | None:
        """Steps that have ended, None while no sequence runs."""
        return self._engine.num_steps if self._batch.num_running else None
