"""The prefill worker's core: takes prompts from routers, sees each to its one end, lets go of all it held.

    Prefill ──▶ hand-off opens, prompt waits ──▶ chunks ──▶ PrefillDone ──▶ HandoffDone
                        └────────────┴───────────┴────────────┴──▶ Failed | released

A prompt ends once, at `_end`: committed, finished by its first token, failed, expired,
released by its router, or its router lost. From there on nothing more is said about it; its
blocks come back as soon as the running step and the sender have let go of them.

All calls on the loop, none awaits but `run` and `drained`. Knows no gRPC.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

from engine.block_pool import BlockPool
from engine.sequence import Sequence
from engine.step import SampledToken
from kvtransfer.base import Sender, TransferReport
from prefill_worker.handoff import BlockHandoff, Destination, HandoffPolicy
from prefill_worker.prompt import Prompt, RouterPort
from prefill_worker.scheduler import BatchLimits
from prefill_worker.step_loop import StepEngine, StepLoop
from tandem.clock import Clock
from tandem.errors import DeadlineExceeded, InternalError, InvalidRequest, Reason, TandemError, Unavailable
from tandem.telemetry.logging import get_logger
from tandem.telemetry.observers import WorkerObserver
from tandem.telemetry.observers_silent import SilentWorker
from tandem.telemetry.trace_context import trace_id_of
from tandem.types import FinishReason, Handle, SequenceSpec, TokenDelta, WorkerLoad
from tandem.validation import Validator

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What the worker works with; owned and closed by whoever made them."""

    engine: StepEngine
    pool: BlockPool
    sender: Sender
    validator: Validator
    clock: Clock
    observer: WorkerObserver = field(default_factory=SilentWorker)


class PrefillWorker:
    """A `worker.service.WorkerCore` that computes prompts and hands them over."""

    def __init__(
        self, parts: WorkerParts, limits: BatchLimits, policy: HandoffPolicy, max_sequence_tokens: int
    ) -> None:
        self._parts = parts
        self._policy = policy
        self._max_sequence_tokens = max_sequence_tokens
        self._steps = StepLoop(parts.engine, parts.pool, limits, parts.clock, self, parts.observer)
        self._live: dict[tuple[RouterPort, Handle], Prompt] = {}
        self._handoffs: dict[Prompt, BlockHandoff] = {}
        self._expiries: dict[Prompt, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    # --- from routers (WorkerCore) ---

    def reserve(self, session: RouterPort, handle: Handle, spec: SequenceSpec, local_prefill: bool) -> None:
        """Raises InvalidRequest: only decode workers make room."""
        raise InvalidRequest("reserve", "this is a prefill worker")

    def prefill(
        self, session: RouterPort, handle: Handle, spec: SequenceSpec, ticket: bytes, kv_endpoint: bytes
    ) -> None:
        """Puts a prompt in line and begins to open its hand-off.

        Raises Unavailable while draining, and InvalidRequest; nothing is held then.
        """
        if self._draining:
            raise Unavailable("this prefill worker takes no new work", Reason.DRAINING)
        self._parts.validator.validate_sequence(spec, self._max_sequence_tokens)
        num_blocks = -(-len(spec.token_ids) // self._parts.pool.block_size)
        observer = self._parts.observer.sequence(spec)
        prompt = Prompt(session, handle, Sequence(spec), num_blocks, self._parts.clock.now_s(), observer)
        self._idle.clear()
        self._live[session, handle] = prompt
        self._handoffs[prompt] = self._new_handoff(prompt, Destination(ticket, kv_endpoint))
        if spec.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._expiries[prompt] = loop.call_later(spec.timeout_s, self._expire, prompt)
        self._steps.add(prompt)

    def release(self, session: RouterPort, handle: Handle) -> None:
        """Nothing more is wanted of it. Idempotent."""
        prompt = self._live.get((session, handle))
        if prompt is not None:
            self._end(prompt)

    def router_lost(self, session: RouterPort) -> None:
        """Lets go of all that this router had asked for."""
        for prompt in [prompt for (router, _), prompt in self._live.items() if router is session]:
            self._end(prompt)

    # --- from the process ---

    async def run(self) -> None:
        """Steps until cancelled. Anything it raises is our own bug and the end of the process."""
        await self._steps.run()

    def drain(self) -> None:
        """Takes no new prompts from now on. Idempotent."""
        self._draining = True

    async def drained(self) -> None:
        """Returns once no prompt is live, no transfer runs and every block is free."""
        await self._idle.wait()

    def check_idle(self) -> None:
        """Raises InternalError if anything is still held. For when idle."""
        if self._live or self._handoffs or self._expiries or self._steps.stepping:
            raise InternalError(f"not idle: {len(self._live)} prompts, {len(self._handoffs)} transfers")
        self._parts.pool.assert_idle()

    def load(self) -> WorkerLoad:
        """How it fares now."""
        scheduler = self._steps.scheduler
        return WorkerLoad(
            engine_steps=self._parts.engine.num_steps,
            running_seqs=scheduler.num_running,
            waiting_seqs=scheduler.num_waiting,
            queued_prompt_tokens=scheduler.num_queued_tokens,
            pool=self._parts.pool.counts(),
            live_transfers=len(self._handoffs),
            draining=self._draining,
        )

    # --- from the step loop (StepListener) ---

    def chunk_computed(self, prompt: Prompt) -> None:
        """Lends the blocks that are filled to the end: the next chunk will not touch them."""
        num_finished = prompt.sequence.num_computed_tokens // self._parts.pool.block_size
        self._handoffs[prompt].lend(prompt.sequence.block_table, num_finished)

    def first_token_sampled(self, prompt: Prompt, token: SampledToken) -> None:
        """Tells the router at once, then hands over the rest, unless the token ends the sequence."""
        finish_reason = prompt.sequence.append_token(token.token_id)
        self._say_first_token(prompt, token, finish_reason)
        prompt.observer.first_token()
        if finish_reason is None:
            self._handoffs[prompt].finish(prompt.sequence.block_table, token.token_id)
        else:
            self._end(prompt)

    def step_failed(self, prompt: Prompt, error: InternalError) -> None:
        """The engine broke on it."""
        self._fail(prompt, error)

    def step_ended(self) -> None:
        """Blocks of ended prompts are back."""
        self._note_idle()

    def _say_first_token(self, prompt: Prompt, token: SampledToken, finish_reason: FinishReason | None) -> None:
        delta = TokenDelta(
            offset=prompt.sequence.spec.num_output_tokens,
            token_ids=(token.token_id,),
            logprobs=() if token.logprobs is None else (token.logprobs,),
            finish_reason=finish_reason,
        )
        now_s = self._parts.clock.now_s()
        started_s = now_s if prompt.started_s is None else prompt.started_s
        prompt.router.prefill_done(prompt.handle, delta, started_s - prompt.received_s, now_s - started_s)

    # --- from hand-offs ---

    def _new_handoff(self, prompt: Prompt, destination: Destination) -> BlockHandoff:
        handoff = BlockHandoff(
            self._parts.sender,
            self._parts.pool,
            self._policy,
            on_started=prompt.observer.transfer_started,
            on_committed=partial(self._committed, prompt),
            on_failed=partial(self._fail, prompt),
            on_freed=partial(self._freed, prompt),
        )
        handoff.start(destination)
        return handoff

    def _committed(self, prompt: Prompt, report: TransferReport) -> None:
        prompt.router.handoff_done(prompt.handle, report.num_bytes, report.seconds)
        prompt.observer.transferred(report.num_bytes, report.seconds, report.transport)
        self._end(prompt)

    def _freed(self, prompt: Prompt) -> None:
        if self._handoffs[prompt].ended:
            del self._handoffs[prompt]
        self._steps.wake()
        self._note_idle()

    # --- ends ---

    def _expire(self, prompt: Prompt) -> None:
        self._fail(prompt, DeadlineExceeded(f"prompt of request {prompt.sequence.spec.request_id} ran out of time"))

    def _fail(self, prompt: Prompt, error: TandemError) -> None:
        spec = prompt.sequence.spec
        _log.warning(
            "prompt failed",
            request_id=spec.request_id,
            trace_id=trace_id_of(spec.traceparent),
            reason=error.reason,
            error=error.message,
        )
        prompt.router.failed(prompt.handle, error)
        self._end(prompt, error)

    def _end(self, prompt: Prompt, error: TandemError | None = None) -> None:
        del self._live[prompt.router, prompt.handle]
        expiry = self._expiries.pop(prompt, None)
        if expiry is not None:
            expiry.cancel()
        prompt.observer.ended(error, prompt.num_sampled_tokens)
        self._steps.remove(prompt)
        self._handoffs[prompt].abort()
        self._note_idle()

    def _note_idle(self) -> None:
        if self._idle.is_set() or self._live or self._handoffs or self._steps.stepping:
            return
        pool = self._parts.pool
        if pool.num_free != pool.num_blocks:  # INVARIANT: nobody is left who could give them back
            _log.error("blocks are held by nobody", num_blocks=pool.num_blocks - pool.num_free)
        self._idle.set()
