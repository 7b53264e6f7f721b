"""Who gets blocks next: prompts for other workers, then reservations, as far as there are room and seats.

    in line ─ next_reservation ─▶ blocks RESERVED under a ticket (incoming transfer), or prompt computed here
       └─ ended ─▶ gone                 released, failed, out of time, router lost

The first in line that fits is admitted. It fits if its tokens and its expected growth find room beside what all who
were admitted are expected to hold (`worker.admission`), and if there are not too many before it for the seats. Nobody
waits for one that could not be admitted at all before blocks leave quarantine. While the prompt whose turn it is lacks
room, no reservation is admitted before it, so that what runs here ends and makes that room; but an overdue reservation
goes before all prompts. Decides; the worker carries it out. Knows no routers.

INVARIANT: no deadlock between reservations and running requests. A reservation takes all its
blocks at once and never asks for more while it holds them, so it never waits for a request.
What it waits for (its hand-off, or its expiry) does not need free blocks here, and ends in
bounded time; then its blocks are free, or belong to a request, which can be preempted. So
what a running request waits for never waits for it. Checked by
`tests/unit/decode_worker/test_no_deadlock.py`: random arrivals and hand-offs that commit, fail
or stall, on a pool too small for them, until everybody has ended.

INVARIANT: no deadlock between workers that compute for each other. A prompt that is being computed has all that it
needs. Then it waits for its grant: for a reservation elsewhere, which may wait for prompts that wait for a reservation
here. What was granted is pushed in bounded time. So if a worker can do nothing more, and something lacks room there,
then for prompts that are computed and not granted, or for a hand-off whose prompt is long in coming. The last in rank
of them fails once that has lasted for `STANDSTILL_S` (`stuck`), and its router goes on from its first tokens with other
workers. Each time that happens the request has come further, so it ends. Checked by
`tests/integration/test_elastic_pairs.py`.
"""

from __future__ import annotations

from itertools import islice

from decode_worker.incoming_transfers import IncomingTransfers
from decode_worker.running_batch import RunningBatch
from prefill_worker.prompts import Prompts
from tandem.errors import Overloaded
from worker.admission import Forecast, Line, is_overdue, note_overtaken
from worker.ports import WorkerParts
from worker.request import Request
from worker.tuning import LOOK_AHEAD, PROMPT_STEPS, SEATS_AHEAD

MAX_QUEUED = 1024
"""Reservations that may wait on a worker; routers queue before that."""
STANDSTILL_S = 2.0
"""How long nothing may go on for lack of room before one that holds room fails: longer than most hand-offs take."""


class Reservations:
    """The line of reservations, and of what is admitted before it."""

    def __init__(
        self,
        parts: WorkerParts,
        forecast: Forecast,
        batch: RunningBatch,
        transfers: IncomingTransfers,
        prompts: Prompts,
    ) -> None:
        self.line = Line(lambda request: request.rank)
        self._max_seqs = parts.sizes.max_seqs
        self._cache = parts.cache
        self._pool = parts.cache.pool
        self._forecast = forecast
        self._batch = batch
        self._transfers = transfers
        self._prompts = prompts
        self._stuck_since_s: float | None = None

    @property
    def num_seqs_in_line(self) -> int:
        """Returns the sequences of all that are in line."""
        return sum(request.group.num_seats for request in self.line)

    def num_tokens_in_line(self, *, computed_elsewhere: bool) -> int:
        """Returns the tokens of all in line, with or without those of prompts that are computed elsewhere."""
        return sum(
            request.group.num_remaining_tokens
            for request in self.line
            if computed_elsewhere or request.owes_prefill_done
        )

    def add(self, request: Request) -> None:
        """Puts a reservation in line. Raises Overloaded if the line is full."""
        if len(self.line) >= MAX_QUEUED:
            raise Overloaded(f"{len(self.line)} requests already wait for KV blocks")
        self.line.add(request)

    def ended(self, request: Request, *, in_batch: bool, failed: bool) -> None:
        """Forgets a request; what its completions came to is remembered."""
        self.line.remove(request)
        for seq in request.group.sequences if in_batch and not failed else ():
            if seq.num_output_tokens:
                self._forecast.completed(seq.num_output_tokens)

    def next_reservation(self) -> Request | None:
        """Starts prompts for others as far as there is room; then takes the next reservation out of the line for which
        there are seats and blocks, unless a prompt waits for these.
        """
        request = self._next() if self._start_prompts() and len(self.line) else None
        if request is not None:
            self.line.remove(request)
            note_overtaken(self.line, [request])
        return request

    def stuck(self, now_s: float) -> Request | None:
        """Returns the request that is to fail, if nothing has gone on for lack of room for `STANDSTILL_S`.

        Called at intervals. One that stands still holds room that others need, and cannot lose it to them: hand-offs
        under way, or else computed prompts that wait for their grant.
        """
        holders, lacks_room = self._transfers.requests, self._batch.is_dry
        if not holders:
            holders = self._prompts.ungranted
            lacks_room = bool(len(self.line) or self._prompts.num_in_line or len(self._batch))
        if not holders or not lacks_room or self._batch.releases.num_in_flight:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now_s
        elif now_s - self._stuck_since_s >= STANDSTILL_S:
            self._stuck_since_s = None
            return max(holders, key=lambda each: each.rank)
        return None

    def _start_prompts(self) -> bool:
        """Returns False if the next prompt for another worker waits for room that reservations must not take."""
        while self._prompts.num_in_line and not any(map(is_overdue, islice(self.line, 1))):
            growth = 0
            if self._batch.num_running:
                growth = self._forecast.most_blocks(self._batch.running, self._batch.waiting, PROMPT_STEPS)
            started, lacks_room = self._prompts.start_next(self._cache.num_available - growth)
            if started is None:
                return not lacks_room
            note_overtaken(self.line, [started])
        return True

    def _next(self) -> Request | None:
        """Returns the first in line that fits, unless an overdue one before it waits for room."""
        num_seqs = self._transfers.num_seqs + self._batch.num_running + self._batch.num_waiting
        seats = SEATS_AHEAD * self._max_seqs - num_seqs
        if seats <= 0:
            return None
        available = self._cache.num_available
        if num_seqs:
            available -= self._forecast.most_blocks(
                self._batch.running, (*self._batch.waiting, *self._transfers.requests)
            )
        most_blocks = self._pool.num_blocks - self._pool.counts().quarantined
        for place, request in enumerate(islice(self.line, LOOK_AHEAD)):
            group = request.group
            num_missing = group.num_missing_blocks(self._pool)
            num_lacking = (self._forecast.all_blocks(group) if num_seqs else num_missing) - available
            if group.num_seats <= seats and (
                num_lacking <= 0 or (place == 0 and num_lacking <= self._num_held(request))
            ):
                return request
            if is_overdue(request) and num_missing <= most_blocks:
                return None
        return None

    def _num_held(self, request: Request) -> int:
        """Returns the blocks that others hold and that a request will share. Looked for only of the first in line: that
        takes time.

        A request that is to be computed here finds its blocks later, and competes for room without them.
        """
        if request.owes_prefill_done:
            return 0
        return self._cache.num_held(request.spec.cache_salt, request.group.prefix.token_ids)
