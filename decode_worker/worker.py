"""The decode worker's core: lets sequences in, sees each to its one end, lets go of all it held.

    Reserve ─▶ queue ─▶ Reserved ─▶ landing ─▶ roster ─▶ StepOutputs … finish
                           └─ (prompt computed here) ─▶ roster ─▶ PrefillDone, StepOutputs … finish
               └────────────┴───────────┴─────────┴─▶ Failed | released

A sequence ends once, at `_end`: finished, failed, out of time, released by its router, or its
router lost. From there on nothing more is said about it. Its blocks are back at once, or when
the running step, or the writer of its hand-off, has let go of them.

Nobody waits for new work to be noticed: `tick` lets deadlines, tickets and hand-offs run out.
All calls on the loop; none awaits but `run` and `drained`. Knows no gRPC.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from decode_worker.arrival import Arrival, RouterPort
from decode_worker.landing import LandingPolicy, LandingStrip
from decode_worker.reservations import MAX_QUEUED, ReservationQueue, Room
from decode_worker.resident import Resident
from decode_worker.roster import Roster
from decode_worker.scheduler import StepLimits
from decode_worker.step_loop import StepEngine, StepLoop
from decode_worker.ticker import Ticker
from engine.block_pool import BlockPool
from kvtransfer.base import Receiver
from tandem.clock import Clock, Deadline
from tandem.errors import (
    DeadlineExceeded,
    FrameError,
    InternalError,
    InvalidRequest,
    Overloaded,
    Reason,
    TandemError,
    Unavailable,
)
from tandem.telemetry.logging import get_logger
from tandem.telemetry.observers import WorkerObserver
from tandem.telemetry.observers_silent import SilentWorker
from tandem.telemetry.trace_context import trace_id_of
from tandem.types import BlockId, Handle, SequenceSpec, TokenId, WorkerLoad
from tandem.validation import Validator

_log = get_logger(__name__)

TICK_S = 0.05
"""Between two looks at what has run out of time."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What the worker works with; owned and closed by whoever made them."""

    engine: StepEngine
    pool: BlockPool
    receiver: Receiver
    validator: Validator
    clock: Clock
    observer: WorkerObserver = field(default_factory=SilentWorker)


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """Caps and times."""

    limits: StepLimits
    max_sequence_tokens: int
    max_queued: int = MAX_QUEUED
    landing: LandingPolicy = field(default_factory=LandingPolicy)


class DecodeWorker:
    """A `worker.service.WorkerCore` that owns a paged pool and decodes in it."""

    def __init__(self, parts: WorkerParts, policy: WorkerPolicy) -> None:
        self._parts = parts
        self._policy = policy
        self._queue = ReservationQueue(policy.limits, policy.max_queued)
        self._landings = LandingStrip(parts.pool, parts.receiver, parts.clock, self, policy.landing)
        self._roster = Roster(parts.pool, policy.limits)
        self._steps = StepLoop(
            self._roster, parts.engine, parts.clock, self._step_took, self._look_again, parts.observer
        )
        self._arrivals: dict[tuple[RouterPort, Handle], Arrival] = {}
        self._num_arrived = 0
        self._draining = False
        self._look_pending = False
        self._idle = asyncio.Event()
        self._idle.set()

    # --- from routers (WorkerCore) ---

    def reserve(self, session: RouterPort, handle: Handle, spec: SequenceSpec, local_prefill: bool) -> None:
        """Puts a sequence in line; `Reserved` follows when there is room, or `Failed`."""
        try:
            self._check(session, handle, spec)
        except TandemError as error:
            session.failed(handle, error)
            return
        arrival = self._arrive(session, handle, spec, local_prefill)
        self._arrivals[session, handle] = arrival
        self._idle.clear()
        try:
            self._queue.add(arrival)
        except Overloaded as error:
            self._fail(arrival, error)
        self._look_soon()

    def prefill(
        self, session: RouterPort, handle: Handle, spec: SequenceSpec, ticket: bytes, kv_endpoint: bytes
    ) -> None:
        """Refuses: what is prefilled here is asked for by `reserve`."""
        session.failed(handle, InvalidRequest("prefill", "this is a decode worker"))

    def release(self, session: RouterPort, handle: Handle) -> None:
        """Nothing more is wanted of it. Idempotent."""
        arrival = self._arrivals.get((session, handle))
        if arrival is not None:
            self._end(arrival)

    def router_lost(self, session: RouterPort) -> None:
        """Lets go of all that this router had asked for."""
        for arrival in [a for a in self._arrivals.values() if a.router is session]:
            self._end(arrival)

    # --- from the process ---

    async def run(self) -> None:
        """Steps and ticks until cancelled. Anything it raises is our own bug and the end of the process."""
        ticker = Ticker(TICK_S, self.tick)
        ticker.start()
        try:
            await self._steps.run()
        finally:
            ticker.stop()

    def tick(self) -> None:
        """Lets time run out: deadlines, tickets, hand-offs. Whether or not new work arrives."""
        for arrival in [a for a in self._arrivals.values() if a.deadline.passed]:
            self._fail(arrival, DeadlineExceeded(f"request {arrival.spec.request_id} ran out of time"))
        self._landings.expire()
        self._look_soon()

    def drain(self) -> None:
        """Takes no new sequences from now on. Idempotent."""
        self._draining = True

    async def drained(self) -> None:
        """Returns once no sequence is here and the engine has let go of all of them."""
        await self._idle.wait()

    def check_idle(self) -> None:
        """Raises InternalError if anything is still held. For when idle and every writer has stopped."""
        held = (len(self._arrivals), len(self._queue), len(self._landings), len(self._roster))
        if any(held) or not self._roster.is_settled:
            raise InternalError("not idle: {} sequences; {} queued, {} landing, {} in the batch".format(*held))
        self._parts.pool.assert_idle()

    def load(self) -> WorkerLoad:
        """How it fares now."""
        return WorkerLoad(
            engine_steps=self._parts.engine.num_steps,
            running_seqs=self._roster.num_running,
            waiting_seqs=len(self._queue) + self._roster.num_waiting,
            queued_prompt_tokens=self._queue.num_tokens + self._roster.num_prompt_tokens_left,
            pool=self._parts.pool.counts(),
            live_transfers=self._parts.receiver.num_live,
            draining=self._draining,
            preemptions=self._roster.num_preemptions,
        )

    # --- from hand-offs (LandingOwner) ---

    def landed(self, arrival: Arrival, block_ids: tuple[BlockId, ...], first_token: TokenId) -> None:
        """Its KV is here and verified: it joins the batch."""
        if first_token >= self._parts.validator.vocab_size:
            self._parts.pool.release(block_ids)
            self._fail(arrival, FrameError(f"first token {first_token} is not in the vocabulary"))
            return
        resident = Resident.landed(arrival, block_ids, first_token)
        self._roster.join(resident)
        if resident.sequence.is_finished:
            self._end(arrival)
        self._look_soon()

    def landing_failed(self, arrival: Arrival, error: TandemError) -> None:
        """Nothing of it may be decoded."""
        self._fail(arrival, error)

    def blocks_freed(self) -> None:
        """There may be room for the next one."""
        self._look_soon()

    # --- from the step loop ---

    def _step_took(self, arrival: Arrival, error: TandemError | None) -> None:
        if error is None:
            self._end(arrival)
        else:
            self._fail(arrival, error)

    # --- letting in ---

    def _check(self, session: RouterPort, handle: Handle, spec: SequenceSpec) -> None:
        if self._draining:
            raise Unavailable("this decode worker takes no new work", Reason.DRAINING)
        if (session, handle) in self._arrivals:
            raise InvalidRequest("handle", f"{handle} is in use")
        self._parts.validator.validate_sequence(spec, self._policy.max_sequence_tokens)

    def _arrive(self, session: RouterPort, handle: Handle, spec: SequenceSpec, local_prefill: bool) -> Arrival:
        self._num_arrived += 1
        clock = self._parts.clock
        deadline = Deadline.after(clock, spec.timeout_s)
        observer = self._parts.observer.sequence(spec)
        return Arrival(session, handle, spec, local_prefill, self._num_arrived, clock.now_s(), deadline, observer)

    def _look_soon(self) -> None:
        """Something has changed. Once per turn of the loop, however many things change in it."""
        if not self._look_pending:
            self._look_pending = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        """Lets in whom there is room for, and wakes the step loop."""
        self._look_pending = False
        while len(self._queue) and (arrival := self._queue.pop_admissible(self._room())) is not None:
            try:
                self._let_in(arrival)
            except TandemError as error:
                self._fail(arrival, error)
        self._steps.wake()
        if not self._arrivals and self._roster.is_settled:
            self._idle.set()

    def _room(self) -> Room:
        return Room(
            free_blocks=self._parts.pool.num_free,
            missing_blocks=self._roster.missing_blocks,
            num_landing=len(self._landings),
            num_seqs=len(self._roster),
        )

    def _let_in(self, arrival: Arrival) -> None:
        if arrival.local_prefill:
            self._roster.join(Resident(arrival))
            arrival.router.reserved(arrival.handle, b"", b"")
        else:
            offer = self._landings.offer(arrival)
            arrival.observer.reserved()
            arrival.router.reserved(arrival.handle, offer.ticket, offer.endpoint)

    # --- ends ---

    def _fail(self, arrival: Arrival, error: TandemError) -> None:
        """Ends it with a last word to its router. A no-op on one that has ended."""
        if (arrival.router, arrival.handle) in self._arrivals:
            self._end(arrival, error)
            arrival.router.failed(arrival.handle, error)
            _log.info(
                "sequence failed",
                request_id=arrival.spec.request_id,
                trace_id=trace_id_of(arrival.spec.traceparent),
                reason=error.reason,
                error=error.message,
            )

    def _end(self, arrival: Arrival, error: TandemError | None = None) -> None:
        """Lets go of it in whatever room it is. A no-op on one that has ended."""
        if self._arrivals.pop((arrival.router, arrival.handle), None) is not None:
            self._queue.discard(arrival)
            self._landings.withdraw(arrival)
            resident = self._roster.leave(arrival)
            arrival.observer.ended(error, 0 if resident is None else resident.num_sampled_tokens)
            self._look_soon()
