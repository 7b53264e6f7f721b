"""The step loop: plan, launch, await, apply, tell the listener. Owns the blocks of prompts.

Blocks are taken when the scheduler admits a request and given back at one place, `_free`:
when the prompt is computed, fails or is removed. INVARIANT: blocks of a prompt that the
engine computes are freed only after that step has ended, else another prompt's KV would be
overwritten; `remove` defers it.

One step is in flight: a prefill step takes tens to hundreds of milliseconds, and planning the next
one well under one, so `--overlap-steps` (decode) would gain nothing here and delay every first token.

Woken by events, never by a timer. Knows no routers and no transfers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from engine.block_pool import BlockPool
from engine.engine_thread import EngineBroken
from engine.step import BrokenLogits, Sampled, SampledToken, Step, StepFailed, StepResult
from engine.thread_work import to_the_end
from prefill_worker.scheduler import BatchLimits, Chunk, PrefillScheduler
from tandem.clock import Clock
from tandem.errors import TandemError
from tandem.telemetry.logging import get_logger
from tandem.telemetry.observers import StepReport, WorkerObserver
from worker.ports import StepEngine
from worker.request import Request

_log = get_logger(__name__)


class StepListener(Protocol):
    """Told what became of requests. Called on the loop; may call `remove` for the request it is told of."""

    def prompt_started(self, request: Request) -> None:
        """Its first chunk is about to be computed."""

    def lent_blocks(self) -> Mapping[str, int]:
        """Blocks that prompts computed before still hold, by destination."""

    def chunk_computed(self, request: Request) -> None:
        """More of the prompt has KV."""

    def prompt_computed(self, request: Request, tokens: tuple[SampledToken, ...]) -> None:
        """All of it has KV; one token per drawer of its prefix, in order.

        The prefix's blocks are given back right after the call: retain what is still needed.
        """

    def request_failed(self, request: Request, error: TandemError) -> None:
        """A step with this request failed, or its logits are broken; its blocks were given back."""

    def step_ended(self) -> None:
        """After the calls for every request of a step."""


class StepLoop:
    """Runs prompts of one worker through its engine until their first tokens are drawn."""

    def __init__(
        self,
        engine: StepEngine,
        pool: BlockPool,
        limits: BatchLimits,
        clock: Clock,
        listener: StepListener,
        observer: WorkerObserver,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._clock = clock
        self._listener = listener
        self._observer = observer
        self.scheduler = PrefillScheduler(limits, pool.block_size, pool.num_blocks)
        """For others: its counters only."""
        self._wake = asyncio.Event()
        self._in_flight: tuple[Chunk, ...] = ()

    @property
    def num_tokens_in_flight(self) -> int:
        """Tokens that the engine computes now."""
        return sum(chunk.num_tokens for chunk in self._in_flight)

    def add(self, request: Request) -> None:
        """Puts a request in line. Its prompt's blocks must fit into an empty pool."""
        self.scheduler.add(request)
        self._wake.set()

    def remove(self, request: Request) -> None:
        """Forgets a request and gives back its blocks, after the current step if that computes it."""
        self.scheduler.remove(request)
        if all(chunk.request is not request for chunk in self._in_flight):
            self._free(request)

    def wake(self) -> None:
        """Blocks became free elsewhere: plan again."""
        self._wake.set()

    async def run(self) -> None:
        """Steps until cancelled. Raises EngineBroken."""
        while True:
            plan = self.scheduler.plan(self._pool.num_free, self._listener.lent_blocks())
            for request in plan.admitted:
                request.group.prefix.add_blocks(self._pool.allocate(self.scheduler.num_blocks(request)))
            if plan.chunks:
                await self._step(plan.chunks)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _step(self, chunks: tuple[Chunk, ...]) -> None:
        self._note_started(chunks)
        result: StepResult | None = None
        failure = StepFailed("the step was given up")
        self._in_flight = chunks
        try:
            step = Step(tuple(chunk.request.group.prefix.schedule(chunk.num_tokens) for chunk in chunks))
            result = await to_the_end(self._engine.launch(step))
            specs = tuple(chunk.request.spec for chunk in chunks)
            self._observer.step(StepReport(result.seconds, self.num_tokens_in_flight, 0, specs))
        except Exception as error:  # noqa: BLE001 - whatever broke ends these requests; the worker only if no step works
            _log.exception("a step failed", num_seqs=len(chunks))
            failure = StepFailed.of(error)
        finally:
            self._in_flight = ()  # the step has ended, however the wait did
        for number, chunk in enumerate(chunks):
            self._settle(chunk, failure if result is None else result.outputs[number])
        self._listener.step_ended()
        if isinstance(failure, EngineBroken):
            raise failure

    def _note_started(self, chunks: tuple[Chunk, ...]) -> None:
        now_s = self._clock.now_s()
        for chunk in chunks:
            if chunk.request.started_s is None:
                chunk.request.started_s = now_s
                chunk.request.observer.started()
                self._listener.prompt_started(chunk.request)

    def _settle(self, chunk: Chunk, outcome: tuple[Sampled, ...] | StepFailed) -> None:
        request = chunk.request
        if request not in self.scheduler:  # removed while the step ran
            self._free(request)
        elif isinstance(outcome, StepFailed):
            self._give_up(request, outcome)
        else:
            self._advance(chunk, outcome)

    def _advance(self, chunk: Chunk, sampled: tuple[Sampled, ...]) -> None:
        request, prefix = chunk.request, chunk.request.group.prefix
        end = prefix.num_computed_tokens
        self._pool.set_filled(prefix.block_table, end, from_token=end - chunk.num_tokens)
        if not chunk.is_last:
            self._listener.chunk_computed(request)
            return
        tokens = tuple(each[0] for each in sampled if not isinstance(each, BrokenLogits))
        if len(tokens) < len(sampled):
            self._give_up(request, BrokenLogits().error(request.spec.request_id))
        else:
            self._listener.prompt_computed(request, tokens)
            self.remove(request)

    def _give_up(self, request: Request, error: StepFailed) -> None:
        self.remove(request)
        self._listener.request_failed(request, error)

    def _free(self, request: Request) -> None:
        blocks = request.group.prefix.take_blocks()
        if blocks:
            self._pool.release(blocks)
            self._wake.set()
