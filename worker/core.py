"""The core of every worker: takes requests from routers, brings each to its one end, releases all it held.

    Reserve, Prefill ──▶ source: line ─▶ steps ─▶ … ──▶ finished | handed over
                                  └─────────┴──────────▶ Failed | released

Which requests it takes, and what becomes of each, is a matter of its sources (`worker.source`). A request, with all
its choices, ends once, at `end`: finished, failed, out of time, released by its router, or its router lost. From there
on nothing more is said about it. Its blocks are free at once, or when the last step that touches them, or the writer of
its hand-off, has stopped.

Nothing waits for new work to be noticed: `tick` lets deadlines, tickets and hand-offs run out.
All calls on the loop; none awaits but `run` and `drained`. Knows no gRPC.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from engine.guides import Guide
from shell.clock import Deadline
from shell.telemetry.events import SequenceArrived, SequenceEnded
from shell.telemetry.logging import get_logger
from shell.telemetry.trace_context import trace_id_of
from tandem.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Reason,
    TandemError,
    Unavailable,
    UnsupportedOption,
)
from tandem.types import GroupSpec, Handle, WaitReason, WorkerLoad
from worker.budget import ChunkBudget
from worker.ports import Destination, RouterPort, WorkerParts
from worker.releases import BlockReleases
from worker.request import Request
from worker.source import Owner, Source, Sources, Wait
from worker.step_rate import StepRate
from worker.steps import StepLoop

_log = get_logger(__name__)

TICK_S = 0.05
"""Between two looks at deadlines."""
REPORT_S = 5.0
"""Between two reports of requests that wait: a small part of the silence after which a router tries elsewhere
(`RetryPolicy.silence_s`)."""


class Worker:
    """What a process serves to routers, and the `Owner` of its sources. Answers through the session.

    A TandemError raised by `reserve` or `prefill` becomes the request's `failed`; nothing is held then.
    """

    def __init__(
        self,
        parts: WorkerParts,
        budget: ChunkBudget,
        sources: Callable[[Owner, BlockReleases], Sources],
        *,
        overlap_steps: bool = False,
    ) -> None:
        """`overlap_steps`: see `StepLoop`."""
        self._parts = parts
        self._pool = parts.cache.pool
        self._budget = budget
        self._releases = BlockReleases(self._pool)
        self._sources = sources(self, self._releases)
        self._prompts, self._decodes = self._sources.prompts, self._sources.decodes
        self._steps = StepLoop(self._sources, parts, budget, self._releases, self, self._settle, overlap=overlap_steps)
        self._requests: dict[tuple[RouterPort, Handle], Request] = {}
        self._num_arrived = 0
        self._draining = False
        self._settle_pending = False
        self._step_rate = StepRate()
        self._idle = asyncio.Event()
        self._idle.set()

    # --- from routers ---

    def reserve(
        self,
        session: RouterPort,
        handle: Handle,
        spec: GroupSpec,
        local_prefill: bool,
        max_local_tokens: int | None = None,
    ) -> None:
        """Puts a request in line; `reserved` or `failed` follows. Raises what makes the worker refuse it.

        With `local_prefill` it fails with PrefixNotHeld if the cache lacks more than `max_local_tokens` of what is to
        be computed before every choice can draw.
        """
        if self._decodes is None:
            raise InvalidRequest("reserve", "this is a prefill worker")
        request = self._new(self._decodes, session, handle, spec, None)
        request.owes_prefill_done = local_prefill
        request.max_local_tokens = max_local_tokens if local_prefill else None
        self._follow_grammar(request)

    def prefill(self, session: RouterPort, handle: Handle, spec: GroupSpec, destination: str) -> None:
        """Puts a prompt for another worker in line, to be handed over to where `grant` says, which is at `destination`.

        Raises what makes this worker refuse it.
        """
        if self._prompts is None:
            raise InvalidRequest("prefill", "this is a decode worker")
        request = self._new(self._prompts, session, handle, spec, destination)
        self._follow_grammar(request)

    def _new(
        self, source: Source, session: RouterPort, handle: Handle, spec: GroupSpec, destination: str | None
    ) -> Request:
        if self._draining:
            raise Unavailable("this worker takes no new work", Reason.DRAINING)
        if (session, handle) in self._requests:
            raise InvalidRequest("handle", f"{handle} is in use")
        source.check(spec)
        clock = self._parts.clock
        self._num_arrived += 1
        request = Request(
            session,
            handle,
            spec,
            self._num_arrived,
            clock.now_s(),
            Deadline.after(clock, spec.timeout_s),
            self._parts.events.begin(SequenceArrived(spec, destination is not None)),
            destination,
        )
        request.came_after_tokens = self._budget.num_prompt_tokens
        self._requests[session, handle] = request
        self._idle.clear()
        source.add(request)
        return request

    def _follow_grammar(self, request: Request) -> None:
        """Enters a request once each of its choices has its place in the grammar; at once without a constraint.

        If a choice cannot follow the grammar, then or later, the request fails.
        """
        constraint, guides = request.spec.sampling.constraint, self._parts.guides
        if constraint is None:
            self._enter(request)
            return
        if guides is None:
            self.end(request, UnsupportedOption(f"sampling.{constraint.language}", "not supported by this worker"))
            return

        def ready(places: Sequence[Guide]) -> None:
            request.group.guide_choices(places)
            self._enter(request)

        outputs = [each.output_token_ids for each in request.group.sequences]
        guides.begin(constraint, outputs, ready, partial(self.end, request))

    def _enter(self, request: Request) -> None:
        """Puts a request in line, unless the request has ended since it came."""
        if self._requests.get((request.router, request.handle)) is not request:
            return
        try:
            self._sources.of(request).enter(request)
        except TandemError as error:
            self.end(request, error)
        self.changed()

    def grant(self, session: RouterPort, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        """Lets the hand-off of a prompt open, by what the decode worker minted; a no-op if the prompt has ended.

        Raises InvalidRequest, which ends the stream, on a worker that computes no prompts for others.
        """
        if self._prompts is None:
            raise InvalidRequest("grant", "this is a decode worker")
        request = self._requests.get((session, handle))
        if request is not None and request.for_another:
            self._prompts.grant(request, ticket, kv_endpoint)

    def move(self, session: RouterPort, handle: Handle, to: Destination) -> None:
        """Gives a running request to another worker; a request that cannot leave fails, to be replayed. Of each choice
        fewer tokens are known there than the router was sent.

        Raises InvalidRequest, which ends the stream, on a worker that does not decode.
        """
        if self._decodes is None:
            raise InvalidRequest("hand_over", "this is a prefill worker")
        request = self._requests.get((session, handle))
        if request is not None:
            try:
                self._decodes.move(request, to)
            except TandemError as error:
                self.end(request, error)

    def release(self, session: RouterPort, handle: Handle) -> None:
        """Ends a request of which the router wants nothing more. Idempotent."""
        if self._decodes is not None:
            self._decodes.released(session, handle)
        request = self._requests.get((session, handle))
        if request is not None:
            self.end(request)

    def router_lost(self, session: RouterPort) -> None:
        """Ends all requests of a router."""
        if self._decodes is not None:
            self._decodes.released(session)
        for request in [each for each in self._requests.values() if each.router is session]:
            self.end(request)

    # --- from the process ---

    async def run(self) -> None:
        """Steps and ticks until cancelled. Anything it raises is our own bug and the end of the process."""
        with _ticking(TICK_S, self.tick), _ticking(REPORT_S, self.report_waits):
            await self._steps.run()

    def tick(self) -> None:
        """Ends requests whose time is over, whether or not new work arrives."""
        for request in [each for each in self._requests.values() if each.deadline.passed]:
            self.end(request, DeadlineExceeded(f"request {request.spec.request_id} ran out of time"))
        if self._decodes is not None:
            self._decodes.tick()
            self.changed()

    def report_waits(self) -> None:
        """Sends each router its requests that wait; a worker that drains also offers those that may leave.

        A message per router and reason: to wait is not to be forgotten.
        """
        handles: defaultdict[tuple[RouterPort, WaitReason], list[Handle]] = defaultdict(list)
        for request, reason in self.waits():
            handles[request.router, reason].append(request.handle)
        for (router, reason), waiting in handles.items():
            router.waiting(reason, waiting)
            _log.debug("requests wait", reason=reason, num_requests=len(waiting))
        if self._draining and self._decodes is not None:
            self._decodes.drain(again=True)

    def waits(self) -> Iterator[Wait]:
        """Returns the requests that get no tokens now; those in a line only if something may move it."""
        line_moves = any(source.is_moving for source in self._sources)
        for source in self._sources:
            yield from source.waits(line_moves=line_moves)

    def drain(self) -> None:
        """Refuses new requests from now on, and offers running ones to other workers. Idempotent."""
        self._draining = True
        if self._decodes is not None:
            self._decodes.drain()

    async def drained(self) -> None:
        """Returns once no request is here and no step is in flight."""
        await self._idle.wait()

    def check_idle(self) -> None:
        """Raises InternalError if anything is still held. For when idle and every writer has stopped."""
        if not self._is_idle:
            raise InternalError(f"not idle: {len(self._requests)} requests, {self._releases.num_in_flight} steps")
        self._parts.cache.rest()
        self._pool.assert_idle()

    @property
    def _is_idle(self) -> bool:
        is_settled = all(source.is_settled for source in self._sources)
        return is_settled and not self._requests and not self._releases.num_in_flight

    def load(self) -> WorkerLoad:
        """Returns what runs, waits and is held now."""
        size = self._pool.block_size
        used_bytes, total_bytes = self._parts.device_memory()
        num_unused_slots = sum(each.group.num_unused_slots(size) for each in self._requests.values())
        load = WorkerLoad(
            engine_steps=self._parts.engine.num_steps,
            running_seqs=0,
            waiting_seqs=0,
            queued_prompt_tokens=0,
            pool=self._pool.counts(num_unused_slots),
            live_transfers=0,
            draining=self._draining,
            prompt_tokens_per_s=self._budget.prompt_tokens_per_s(0, 0.0),
            step_s=self._budget.step_s,
            step_objective_s=self._budget.step_objective_s,
            steps_per_s=self._step_rate.look(self._parts.engine.num_steps, self._parts.clock.now_s()),
            chunk_tokens=self._budget.tokens(0, 0.0),
            device_used_bytes=used_bytes,
            device_total_bytes=total_bytes,
        )
        for source in self._sources:
            load = source.add_to(load)
        return load

    # --- from sources and steps (Owner) ---

    def changed(self) -> None:
        """See `Owner`. All changes of one iteration of the loop are looked at together."""
        if not self._settle_pending:
            self._settle_pending = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Admits requests as far as there is room, and wakes the step loop."""
        self._settle_pending = False
        if self._decodes is not None:
            self._decodes.admit()
        self._steps.wake()
        if self._is_idle:
            self._idle.set()

    def end(self, request: Request, error: TandemError | None = None) -> None:
        """See `Owner`. The router hears of a request that failed."""
        if self._requests.pop((request.router, request.handle), None) is None:
            return
        request.has_ended = True
        self._sources.of(request).forget(request, error)
        request.events.emit(SequenceEnded(error, request.num_sampled_tokens))
        self.changed()
        if error is not None:
            request.router.failed(request.handle, error)
            _log.info(
                "request failed",
                request_id=request.spec.request_id,
                trace_id=trace_id_of(request.spec.traceparent),
                reason=error.reason,
                error=error.message,
            )


@contextmanager
def _ticking(interval_s: float, on_tick: Callable[[], None]) -> Iterator[None]:
    """Ticks inside the `with`, first after one interval. A tick that raises is reported by the loop; the next comes."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal timer
        timer = loop.call_later(interval_s, tick)
        on_tick()

    timer = loop.call_later(interval_s, tick)
    try:
        yield
    finally:
        timer.cancel()
