"""The prefill worker's core: takes requests from routers, brings each to its one end, releases all it held.

    Prefill ──▶ in line ──▶ PrefillStarted, chunks ──▶ PrefillDone, first tokens ──▶ HandoffDone
                   │           └──▶ Grant: transfer opens, blocks are pushed ┘
                   └─────────────┴───────────────────────────┴──▶ Failed | released

The prompt is computed once for all choices of a request, and its last token gives each choice its
first. A request ends once, at `_end`: committed, all choices finished by their first tokens, failed,
out of time, released by its router, or its router lost. From there on nothing more is said about it;
its blocks are released as soon as neither the running step nor the sender uses them.

All calls on the loop, none awaits but `run` and `drained`. Knows no gRPC.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.beam_group import candidates_of
from engine.guides import Guides
from engine.prefix_cache import PrefixCache
from engine.step import SampledToken
from kvtransfer.base import Sender, TransferReport
from prefill_worker.scheduler import BatchLimits
from prefill_worker.step_loop import StepLoop
from shell.clock import Clock, Deadline
from shell.telemetry.logging import get_logger
from shell.telemetry.observers import WorkerObserver
from shell.telemetry.trace_context import trace_id_of
from tandem.errors import DeadlineExceeded, InternalError, InvalidRequest, Reason, TandemError, Unavailable
from tandem.first_tokens import encode_first_tokens
from tandem.types import GroupSpec, Handle, WaitReason, WorkerLoad
from tandem.validation import Validator
from worker.constraints import begin_guides
from worker.outgoing_transfer import OutgoingPolicy, OutgoingTransfer
from worker.ports import Destination, RouterPort, StepEngine
from worker.request import Request
from worker.ticker import ticking
from worker.waits import REPORT_S, Wait, report_waits

_log = get_logger(__name__)

TICK_S = 0.05
"""Between two looks at which requests have run out of time."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What the worker works with; its maker owns and closes them."""

    engine: StepEngine
    cache: PrefixCache
    sender: Sender
    validator: Validator
    clock: Clock
    observer: WorkerObserver
    guides: Guides | None = None
    """None = constraints are refused."""


class PrefillWorker:
    """A `worker.ports.WorkerCore` that computes prompts and hands them over."""

    def __init__(
        self, parts: WorkerParts, limits: BatchLimits, policy: OutgoingPolicy, max_sequence_tokens: int
    ) -> None:
        self._parts = parts
        self._policy = policy
        self._max_sequence_tokens = max_sequence_tokens
        self._steps = StepLoop(parts.engine, parts.cache, limits, parts.clock, self, parts.observer)
        self._live: dict[tuple[RouterPort, Handle], Request] = {}
        self._transfers: dict[Request, OutgoingTransfer] = {}
        """One per live request, and those of ended ones whose blocks the sender still uses."""
        self._num_arrived = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    # --- from routers (WorkerCore) ---

    def reserve(
        self,
        session: RouterPort,
        handle: Handle,
        spec: GroupSpec,
        local_prefill: bool,
        max_local_tokens: int | None = None,
    ) -> None:
        """Raises InvalidRequest: only decode workers make room."""
        raise InvalidRequest("reserve", "this is a prefill worker")

    def prefill(self, session: RouterPort, handle: Handle, spec: GroupSpec, destination: str) -> None:
        """Puts a request in line.

        Raises Unavailable while draining, and InvalidRequest; nothing is held then.
        """
        if self._draining:
            raise Unavailable("this prefill worker takes no new work", Reason.DRAINING)
        parts = self._parts
        parts.validator.validate_group(spec)
        parts.validator.validate_prefix(spec, self._max_sequence_tokens)
        self._num_arrived += 1
        deadline = Deadline.after(parts.clock, spec.timeout_s)
        observer, now_s = parts.observer.sequence(spec), parts.clock.now_s()
        request = Request(session, handle, spec, self._num_arrived, now_s, deadline, observer, destination)
        transfer = OutgoingTransfer(request, parts.sender, parts.cache.pool, self._policy, self)
        request.came_after_tokens = self._steps.num_computed_tokens
        self._idle.clear()
        self._live[session, handle] = request
        self._transfers[request] = transfer
        transfer.start()
        begin_guides(parts.guides, request, self._enter, self._fail_if_live)

    def _enter(self, request: Request) -> None:
        """Puts it in line, unless it has ended meanwhile."""
        if self._live.get((request.router, request.handle)) is request:
            self._steps.add(request)

    def _fail_if_live(self, request: Request, error: TandemError) -> None:
        if self._live.get((request.router, request.handle)) is request:
            self.request_failed(request, error)

    def grant(self, session: RouterPort, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        """Lets its transfer open. A no-op for a request that has ended."""
        request = self._live.get((session, handle))
        if request is not None:
            self._transfers[request].grant(ticket, kv_endpoint)

    def hand_over(self, session: RouterPort, handle: Handle, to: Destination) -> None:
        """Refuses, which ends the stream: what this worker holds, it hands over by `grant`."""
        raise InvalidRequest("hand_over", "this is a prefill worker")

    def release(self, session: RouterPort, handle: Handle) -> None:
        """Nothing more is wanted of it. Idempotent."""
        request = self._live.get((session, handle))
        if request is not None:
            self._end(request)

    def router_lost(self, session: RouterPort) -> None:
        """Releases all that this router had asked for."""
        for request in [request for request in self._live.values() if request.router is session]:
            self._end(request)

    # --- from the process (WorkerCore) ---

    async def run(self) -> None:
        """Steps and ticks until cancelled. Whatever it raises is our own bug and ends the process."""
        with ticking(TICK_S, self.tick), ticking(REPORT_S, self.report_waits):
            await self._steps.run()

    def tick(self) -> None:
        """Fails what has run out of time."""
        for request in [request for request in self._live.values() if request.deadline.passed]:
            self.request_failed(
                request, DeadlineExceeded(f"prompt of request {request.spec.request_id} ran out of time")
            )

    def report_waits(self) -> None:
        """Tells each router which of its requests wait, and for what."""
        report_waits(self.waits())

    def waits(self) -> Iterator[Wait]:
        """Every live request: none has more to say before it ends. With nothing under way, the line does not move."""
        scheduler = self._steps.scheduler
        line_moves = len(self._live) > scheduler.num_waiting
        for request in self._live.values():
            if request.started_s is None:
                if line_moves:
                    yield request, WaitReason.PREFILL_LINE
            elif request in scheduler:
                yield request, WaitReason.PROMPT
            else:
                yield request, WaitReason.HANDOFF if self._transfers[request].is_granted else WaitReason.GRANT

    def drain(self) -> None:
        """Takes no new requests from now on. Idempotent."""
        self._draining = True

    async def drained(self) -> None:
        """Returns once no request is live, no transfer runs and every block is free."""
        await self._idle.wait()

    def check_idle(self) -> None:
        """Raises InternalError if anything is still held. For when idle."""
        if self._live or self._transfers or self._steps.num_tokens_in_flight:
            raise InternalError(f"not idle: {len(self._live)} requests, {len(self._transfers)} transfers")
        self._parts.cache.pool.assert_idle()

    def load(self) -> WorkerLoad:
        """What runs, waits and is held now."""
        scheduler, pool = self._steps.scheduler, self._parts.cache.pool
        return WorkerLoad(
            engine_steps=self._parts.engine.num_steps,
            running_seqs=scheduler.num_running,
            waiting_seqs=scheduler.num_waiting,
            queued_prompt_tokens=scheduler.num_queued_tokens + self._steps.num_tokens_in_flight,
            pool=pool.counts(sum(each.group.num_unused_slots(pool.block_size) for each in self._live.values())),
            live_transfers=sum(each.is_granted for each in self._transfers.values()),
            draining=self._draining,
            prompt_tokens_per_s=self._steps.rate.per_s,
        )

    # --- from the step loop (StepListener) ---

    def prompt_started(self, request: Request) -> None:
        """Its router now finds room for it."""
        request.router.prefill_started(request.handle)

    def lent_blocks(self) -> Mapping[str, int]:
        """See `StepListener`: what waits for a grant or is on its way, that of ended requests included."""
        lent: Counter[str] = Counter()
        for request, transfer in self._transfers.items():
            if request not in self._steps.scheduler:
                lent[request.destination] += transfer.num_lent
        return lent

    def chunk_computed(self, request: Request) -> None:
        """Lends the blocks that are filled to the end and in place: the next chunk will not touch them."""
        prefix, cache = request.group.prefix, self._parts.cache
        full = prefix.block_table[: prefix.num_computed_tokens // cache.pool.block_size]
        self._transfers[request].lend(cache.num_loaded(full))

    def prompt_computed(self, request: Request, drawn: tuple[tuple[SampledToken, ...], ...]) -> None:
        """Tells the first tokens at once, then hands over the rest, unless they end every choice.

        Of a beam search there is nothing to tell yet: its first candidates go with the hand-off.
        """
        drawers, num_blocks = request.group.prefix.drawers, len(request.group.prefix.block_table)
        request.prompt_computed(self._parts.clock.now_s())
        if request.spec.sampling.beam_width:
            self._transfers[request].finish(num_blocks, encode_first_tokens(candidates_of(drawn[0])))
            return
        for choice, (token,) in zip(drawers, drawn, strict=True):
            request.take_token(choice, token)
        if request.group.is_finished:
            self._end(request)
        else:
            first_tokens = {choice.index: token.token_id for choice, (token,) in zip(drawers, drawn, strict=True)}
            self._transfers[request].finish(num_blocks, encode_first_tokens(first_tokens))

    def step_ended(self) -> None:
        """Blocks of ended requests are back."""
        self._note_idle()

    # --- from transfers (OutgoingOwner) ---

    def transfer_committed(self, request: Request, report: TransferReport) -> None:
        """The decode worker has all of it."""
        request.router.handoff_done(request.handle, report.num_bytes, report.seconds)
        request.observer.transferred(report.num_bytes, report.seconds, report.transport)
        self._end(request)

    def blocks_returned(self, request: Request) -> None:
        """There may be room for the next one."""
        if self._transfers[request].has_ended:
            del self._transfers[request]
        self._steps.wake()
        self._note_idle()

    # --- ends (StepListener, OutgoingOwner) ---

    def request_failed(self, request: Request, error: TandemError) -> None:
        """Its step or its transfer failed, or its time is over: says so to the router."""
        _log.warning(
            "prompt failed",
            request_id=request.spec.request_id,
            trace_id=trace_id_of(request.spec.traceparent),
            reason=error.reason,
            error=error.message,
        )
        request.router.failed(request.handle, error)
        self._end(request, error)

    def _end(self, request: Request, error: TandemError | None = None) -> None:
        del self._live[request.router, request.handle]
        request.observer.ended(error, request.num_sampled_tokens)
        self._steps.remove(request)
        self._transfers[request].abort()
        self._note_idle()

    def _note_idle(self) -> None:
        if self._idle.is_set() or self._live or self._transfers or self._steps.num_tokens_in_flight:
            return
        self._parts.cache.rest()
        pool = self._parts.cache.pool
        if pool.num_free + pool.num_cached != pool.num_blocks:  # INVARIANT: nothing is left that could release them
            _log.error("blocks were not released", num_blocks=pool.num_blocks - pool.num_free - pool.num_cached)
        self._idle.set()
