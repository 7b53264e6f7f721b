"""The decode worker's core: admits requests, sees each to its one end, releases all it held.

    Reserve ─▶ queue ─▶ Reserved ─▶ incoming transfer ─▶ batch ─▶ tokens … finish
                           └─ (prompt computed here) ──▶ batch ─▶ PrefillDone, tokens … finish
                                                 ├──▶ Leaving ─▶ HandOver ─▶ HandoffDone   it drains, or is overloaded
    Prefill ─▶ line ─▶ prompt computed in the same batch ─▶ HandoffDone   for others, where it is elastic
               └────────────┴──────────────┴─────┴──▶ Failed | released

A request, with all its choices, ends once, at `_end`: finished, failed, out of time, released by its router, or its
router lost. From there on nothing more is said about it. Its blocks are free at once, or when
the last step that touches them, or the writer of its hand-off, has stopped.

Nothing waits for new work to be noticed: `tick` lets deadlines, tickets and hand-offs run out.
All calls on the loop; none awaits but `run` and `drained`. Knows no gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from decode_worker.admission import Admission
from decode_worker.growth import Growth
from decode_worker.hand_overs import HandOvers
from decode_worker.incoming_transfers import IncomingTransfers
from decode_worker.parts import WorkerParts, WorkerPolicy
from decode_worker.prompts_for_others import PromptsForOthers
from decode_worker.running_batch import RunningBatch
from decode_worker.step_loop import StepLoop
from engine.beam_group import BeamGroup
from engine.sequence import new_block_table
from shell.clock import Deadline
from shell.telemetry.logging import get_logger
from shell.telemetry.trace_context import trace_id_of
from tandem.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PrefixNotHeld,
    Reason,
    TandemError,
    Unavailable,
)
from tandem.first_tokens import FirstTokens
from tandem.types import BlockId, GroupSpec, Handle, WaitReason, WorkerLoad
from worker.constraints import begin_guides
from worker.ports import Destination, RouterPort
from worker.request import Request
from worker.ticker import ticking
from worker.waits import REPORT_S, Wait, report_waits

__all__ = ["DecodeWorker", "WorkerParts", "WorkerPolicy"]

_log = get_logger(__name__)

TICK_S = 0.05
"""Between two looks at what has run out of time."""


class DecodeWorker:
    """A `worker.ports.WorkerCore` that owns a paged pool and decodes in it."""

    def __init__(self, parts: WorkerParts, policy: WorkerPolicy) -> None:
        self._parts = parts
        self._policy = policy
        self._pool = parts.cache.pool
        growth = Growth(self._pool, policy.first_guess_tokens)
        self._transfers = IncomingTransfers(
            parts.cache, parts.receiver, parts.clock, self, policy.transfers, parts.validator.vocab_size
        )
        budget = policy.chunk_budget()
        self._batch = RunningBatch(parts.cache, policy.limits, growth, budget)
        self._prompts = PromptsForOthers(self._batch, parts.cache, parts.sender, parts.clock, self)
        self._admission = Admission(
            policy, parts.cache, growth, self._batch, self._transfers, self._prompts, parts.engine
        )
        self._queue = self._admission.queue
        self._steps = StepLoop(
            self._batch,
            self._prompts,
            parts.cache,
            parts.engine,
            parts.clock,
            self._end,
            self._admit,
            parts.observer,
            overlap=policy.overlap_steps,
            max_planning_share=policy.max_planning_share,
            guides=parts.guides,
        )
        self._hand_overs = HandOvers(self._batch, parts.cache, parts.sender, self._end, self._admit_soon)
        self._requests: dict[tuple[RouterPort, Handle], Request] = {}
        self._num_arrived = 0
        self._draining = False
        self._admission_pending = False
        self._idle = asyncio.Event()
        self._idle.set()

    # --- from routers (WorkerCore) ---

    def reserve(
        self,
        session: RouterPort,
        handle: Handle,
        spec: GroupSpec,
        local_prefill: bool,
        max_local_tokens: int | None = None,
    ) -> None:
        """Puts a request in line; `reserved` follows when there is room, or `failed`. Raises what makes it refuse."""
        self._check_new(session, handle)
        self._check(spec)
        request = self._add(session, handle, spec)
        request.owes_prefill_done = local_prefill
        request.max_local_tokens = max_local_tokens if local_prefill else None
        begin_guides(self._parts.guides, request, self._enter, self._end)

    def _add(self, session: RouterPort, handle: Handle, spec: GroupSpec, destination: str | None = None) -> Request:
        """A new request; with a destination, one whose prompt is computed for a worker there."""
        clock = self._parts.clock
        self._num_arrived += 1
        request = Request(
            session,
            handle,
            spec,
            self._num_arrived,
            clock.now_s(),
            Deadline.after(clock, spec.timeout_s),
            self._parts.observer.sequence(spec, for_another=destination is not None),
            destination or "",
        )
        request.came_after_tokens = self._batch.budget.num_prompt_tokens
        self._requests[session, handle] = request
        self._idle.clear()
        return request

    def _enter(self, request: Request) -> None:
        """Puts it in line, unless it has ended meanwhile."""
        if self._requests.get((request.router, request.handle)) is not request:
            return
        if request.for_another:
            self._prompts.enter(request)
            self._admit_soon()
            return
        try:
            self._check_prefix_held(request)
            self._queue.add(request)
            if request.reads_cache:
                request.group.prefetch(self._parts.cache)
        except TandemError as error:
            self._end(request, error)
        self._admit_soon()

    def prefill(self, session: RouterPort, handle: Handle, spec: GroupSpec, destination: str) -> None:
        """Puts a prompt in line that is computed for another worker. Raises what makes it refuse: unless this worker is
        elastic, what is computed here is asked for by `reserve`.
        """
        if not self._policy.elastic:
            raise InvalidRequest("prefill", "this is a decode worker")
        self._check_new(session, handle)
        validator, pool = self._parts.validator, self._pool
        validator.validate_group(spec)
        validator.validate_prefix(spec, min(self._policy.max_sequence_tokens, pool.num_blocks * pool.block_size))
        request = self._add(session, handle, spec, destination)
        self._prompts.add(request)
        begin_guides(self._parts.guides, request, self._enter, self._end)

    def grant(self, session: RouterPort, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        """Lets a prompt's hand-off open; a no-op for one that has ended.

        Unless this worker is elastic it refuses, which ends the stream: only who was asked to prefill is granted
        anything.
        """
        if not self._policy.elastic:
            raise InvalidRequest("grant", "this is a decode worker")
        request = self._requests.get((session, handle))
        if request is not None and request.for_another:
            self._prompts.grant(request, ticket, kv_endpoint)

    def hand_over(self, session: RouterPort, handle: Handle, to: Destination) -> None:
        """Gives a running request to another decode worker; where that cannot be, it fails, to be replayed."""
        request = self._requests.get((session, handle))
        if request is not None:
            try:
                self._hand_overs.begin(request, to)
            except TandemError as error:
                self._end(request, error)

    def release(self, session: RouterPort, handle: Handle) -> None:
        """Nothing more is wanted of it. Idempotent."""
        self._hand_overs.released(session, handle)
        request = self._requests.get((session, handle))
        if request is not None:
            self._end(request)

    def router_lost(self, session: RouterPort) -> None:
        """Releases all that this router had asked for."""
        self._hand_overs.released(session)
        for request in [each for each in self._requests.values() if each.router is session]:
            self._end(request)

    # --- from the process (WorkerCore) ---

    async def run(self) -> None:
        """Steps and ticks until cancelled. Anything it raises is our own bug and the end of the process."""
        with ticking(TICK_S, self.tick), ticking(REPORT_S, self.report_waits):
            await self._steps.run()

    def tick(self) -> None:
        """Lets time run out: deadlines, tickets, hand-offs. Whether or not new work arrives."""
        for request in [each for each in self._requests.values() if each.deadline.passed]:
            self._end(request, DeadlineExceeded(f"request {request.spec.request_id} ran out of time"))
        self._transfers.expire()
        self._admission.give_up_one()
        self._admit_soon()
        if self._draining:
            self._hand_overs.tell(self._requests.values())
        else:
            self._hand_overs.relieve(self._requests.values(), self._parts.clock.now_s())

    def report_waits(self) -> None:
        """Tells each router which of its requests wait, and for what; while it drains, also which may leave."""
        report_waits(self.waits())
        if self._draining:
            self._hand_overs.tell(self._requests.values(), again=True)

    def waits(self) -> Iterator[Wait]:
        """Requests that get no tokens now. Those in a line are left out if nothing is under way that could move it."""
        yield from ((request, WaitReason.HANDOFF) for request in (*self._transfers, *self._hand_overs))
        yield from self._batch.running_waits()
        ours = (each for each in self._requests.values() if not each.for_another)
        yield from ((each, WaitReason.ROOM) for each in ours if each.group.awaits_guides)
        moves = len(self._transfers) or self._batch.num_running or len(self._prompts) > self._prompts.num_in_line
        yield from self._prompts.waits(line_moves=bool(moves))
        if moves:
            yield from ((request, WaitReason.ROOM) for request in self._queue)
            yield from self._batch.line_waits()

    def drain(self) -> None:
        """Takes no new requests from now on, and offers those that run to other workers. Idempotent."""
        self._draining = True
        self._hand_overs.tell(self._requests.values())

    async def drained(self) -> None:
        """Returns once no request is here and no step is in flight."""
        await self._idle.wait()

    def check_idle(self) -> None:
        """Raises InternalError if anything is still held. For when idle and every writer has stopped."""
        held = (len(self._requests), len(self._queue), len(self._transfers), len(self._batch))
        if any(held) or not self._is_settled:
            raise InternalError("not idle: {} requests; {} queued, {} incoming, {} in the batch".format(*held))
        self._parts.cache.rest()
        self._pool.assert_idle()

    @property
    def _is_settled(self) -> bool:
        return self._batch.is_settled and self._hand_overs.is_settled and self._prompts.is_settled

    def load(self) -> WorkerLoad:
        """What runs, waits and is held now; each choice counts as a sequence, a prompt for another worker as one."""
        prompts, batch = self._prompts, self._batch
        return WorkerLoad(
            engine_steps=self._parts.engine.num_steps,
            running_seqs=batch.num_running + prompts.num_computing,
            waiting_seqs=self._queue.num_seqs + batch.num_waiting + prompts.num_in_line,
            queued_prompt_tokens=(
                self._queue.num_tokens(computed_elsewhere=not self._policy.elastic)
                + batch.num_prompt_tokens_left
                + prompts.num_tokens_in_line
            ),
            pool=self._pool.counts(),
            live_transfers=self._parts.receiver.num_live + prompts.num_transfers,
            draining=self._draining,
            preemptions=batch.num_preemptions,
            prompt_tokens_per_s=batch.budget.prompt_tokens_per_s(batch.num_decodes, batch.wait_ratio),
            step_s=batch.budget.step_s,
            step_objective_s=batch.budget.step_objective_s,
            running_for_others=prompts.num_computing,
            waiting_for_others=prompts.num_in_line,
        )

    # --- from hand-offs (TransferOwner) ---

    def received(self, request: Request, block_ids: Sequence[BlockId], first_tokens: FirstTokens) -> None:
        """The prefix's KV is here and verified: all choices join the batch."""
        cache, group, prefix = self._parts.cache, request.group, request.group.prefix
        table = new_block_table(prefix.block_table)
        table.extend(new_block_table(block_ids))
        self._pool.set_filled(table, prefix.num_tokens, prefix.num_computed_tokens)
        cache.insert(request.spec.cache_salt, prefix.token_ids, table)
        self._admission.handoff_landed(request)
        group.land(block_ids, first_tokens, self._pool)
        group.follow(cache)
        if self._parts.guides is not None:
            self._parts.guides.follow(each.guide for each in group.sequences)
        self._batch.join(request)
        self._hand_overs.landed(request, first_tokens, self._parts.clock.now_s())
        if group.is_finished:
            if isinstance(group, BeamGroup):
                request.tell_found(group)
            self._end(request)
        self._admit_soon()

    def transfer_failed(self, request: Request, error: TandemError) -> None:
        """Nothing of it may be decoded."""
        self._end(request, error)

    def blocks_freed(self) -> None:
        """There may be room for the next one."""
        self._admit_soon()

    # --- from prompts for other workers (PromptOwner) ---

    def prompt_ended(self, request: Request, error: TandemError | None) -> None:
        """See `PromptOwner`."""
        self._end(request, error)

    prompt_blocks_returned = blocks_freed

    # --- admission ---

    def _check_new(self, session: RouterPort, handle: Handle) -> None:
        if self._draining:
            raise Unavailable("this worker takes no new work", Reason.DRAINING)
        if (session, handle) in self._requests:
            raise InvalidRequest("handle", f"{handle} is in use")

    def _check(self, spec: GroupSpec) -> None:
        limits, validator, pool = self._policy.limits, self._parts.validator, self._pool
        validator.validate_group(spec, self._policy.max_sequence_tokens)
        validator.validate_pool(spec, pool.block_size, pool.num_blocks)
        if spec.num_seqs > limits.max_seqs:
            raise InvalidRequest(
                f"sampling.{spec.seqs_option}", f"{spec.num_seqs} exceed a batch of {limits.max_seqs} sequences"
            )

    def _check_prefix_held(self, request: Request) -> None:
        """Raises PrefixNotHeld if more would have to be computed here than the request may."""
        if request.max_local_tokens is None:
            return
        group = request.group
        num_tokens = group.num_remaining_tokens
        if request.reads_cache:
            num_tokens -= self._parts.cache.match(request.spec.cache_salt, group.prefix.token_ids)
        if num_tokens > request.max_local_tokens:
            raise PrefixNotHeld(f"{num_tokens} tokens would be computed here, {request.max_local_tokens} may be")

    def _admit_soon(self) -> None:
        """Something has changed. Once per iteration of the loop, however many things change in it."""
        if not self._admission_pending:
            self._admission_pending = True
            asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """Admits queued requests as far as there is room, and wakes the step loop."""
        self._admission_pending = False
        self._hand_overs.steps_ended()
        while (request := self._admission.next_reservation()) is not None:
            try:
                if request.owes_prefill_done:
                    self._check_prefix_held(request)  # it may have gone while the request was in line
                    self._batch.join(request)
                    request.router.reserved(request.handle)
                else:
                    offer, prefix = self._transfers.offer(request), request.group.prefix
                    self._admission.handoff_started(request)
                    request.observer.reserved()
                    request.observer.looked_up(prefix.num_tokens, prefix.num_cached_tokens)
                    request.router.reserved(request.handle, offer.ticket, offer.endpoint, prefix.num_cached_tokens)
            except TandemError as error:
                self._end(request, error)
        self._steps.wake()
        if not self._requests and self._is_settled:
            self._idle.set()

    # --- ends ---

    def _end(self, request: Request, error: TandemError | None = None) -> None:
        """Releases what it holds, wherever that is; tells its router if it failed. A no-op on one that has ended."""
        if self._requests.pop((request.router, request.handle), None) is None:
            return
        self._transfers.withdraw(request)
        self._hand_overs.forget(request)
        self._prompts.forget(request)
        failed = error is not None or self._hand_overs.pushes(request)
        self._admission.ended(request, in_batch=request in self._batch, failed=failed)
        self._batch.leave(request)
        for table in request.group.take_blocks():  # what it held while the rest was to be received
            self._pool.release(table)
        request.observer.ended(error, request.num_sampled_tokens)
        self._admit_soon()
        if error is not None:
            request.router.failed(request.handle, error)
            _log.info(
                "request failed",
                request_id=request.spec.request_id,
                trace_id=trace_id_of(request.spec.traceparent),
                reason=error.reason,
                error=error.message,
            )
