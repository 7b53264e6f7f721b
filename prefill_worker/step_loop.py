"""The step loop: schedule, await the engine, apply, tell the listener. Owns prompts' blocks.

Blocks are taken when the scheduler admits a prompt and given back at one place, `_free`:
when the prompt is computed, fails or is removed. INVARIANT: blocks of a prompt that the
engine is computing are freed only after that step returned, else another prompt's KV would
be written over; `remove` defers it.

Woken by events, never by a timer. Knows no routers and no transfers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from engine.block_pool import BlockPool
from engine.engine_thread import EngineBroken
from engine.step import BrokenLogits, Sampled, SampledToken, ScheduledSeq
from prefill_worker.prompt import Prompt
from prefill_worker.scheduler import BatchLimits, Chunk, PrefillScheduler
from tandem.clock import Clock
from tandem.errors import InternalError
from tandem.telemetry.logging import get_logger
from tandem.telemetry.observers import StepReport, WorkerObserver

_log = get_logger(__name__)


class StepEngine(Protocol):
    """What computes; `engine.engine_thread.EngineThread` is one."""

    @property
    def num_steps(self) -> int:
        """Steps made since start."""
        ...

    async def step(self, batch: Sequence[ScheduledSeq]) -> Sequence[Sampled | None]:
        """One result per seq, None where no token was asked for."""
        ...


class StepListener(Protocol):
    """Hears what became of prompts. Called on the loop; may call `remove` for the prompt it is told of."""

    def chunk_computed(self, prompt: Prompt) -> None:
        """More of the prompt has KV."""
        ...

    def first_token_sampled(self, prompt: Prompt, token: SampledToken) -> None:
        """All of it has KV. Its blocks are given back right after the call: retain what is still needed."""
        ...

    def step_failed(self, prompt: Prompt, error: InternalError) -> None:
        """The engine broke on a step that held this prompt, or the logits of this one; its blocks are gone."""
        ...

    def step_ended(self) -> None:
        """After the calls for every prompt of a step."""
        ...


class StepLoop:
    """Runs prompts of one worker through its engine until each has a first token."""

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
        self._scheduler: PrefillScheduler[Prompt] = PrefillScheduler(limits)
        self._wake = asyncio.Event()
        self._in_step: frozenset[Prompt] = frozenset()
        self._leaving: set[Prompt] = set()

    @property
    def scheduler(self) -> PrefillScheduler[Prompt]:
        """For counters only."""
        return self._scheduler

    @property
    def stepping(self) -> bool:
        """Whether the engine computes now."""
        return bool(self._in_step)

    def add(self, prompt: Prompt) -> None:
        """Puts a prompt in line. Its blocks must fit into an empty pool."""
        self._scheduler.add(prompt)
        self._wake.set()

    def remove(self, prompt: Prompt) -> None:
        """Forgets a prompt and gives back its blocks, after the current step if that computes it."""
        self._scheduler.remove(prompt)
        if prompt in self._in_step:
            self._leaving.add(prompt)
        else:
            self._free(prompt)

    def wake(self) -> None:
        """Blocks became free elsewhere: plan again."""
        self._wake.set()

    async def run(self) -> None:
        """Steps until cancelled. Raises EngineBroken."""
        while True:
            plan = self._scheduler.plan(self._pool.num_free)
            for prompt in plan.admitted:
                prompt.sequence.add_blocks(self._pool.allocate(prompt.num_blocks))
            if plan.chunks:
                await self._step(plan.chunks)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _step(self, chunks: tuple[Chunk[Prompt], ...]) -> None:
        began_s = self._clock.now_s()
        for chunk in chunks:
            if chunk.prompt.started_s is None:
                chunk.prompt.started_s = began_s
                chunk.prompt.observer.started()
        self._in_step = frozenset(chunk.prompt for chunk in chunks)
        failure: InternalError | None = None
        broken: EngineBroken | None = None
        outputs: Sequence[Sampled | None] = [None] * len(chunks)
        try:
            outputs = await self._engine.step([c.prompt.sequence.scheduled(c.num_tokens) for c in chunks])
            self._report(chunks, self._clock.now_s() - began_s)
        except EngineBroken as error:
            failure = broken = error
        except Exception as error:  # noqa: BLE001 - whatever broke ends these prompts, not the worker
            _log.exception("engine step failed")
            failure = InternalError(f"engine step failed: {type(error).__name__}")
        finally:
            self._in_step = frozenset()
        for chunk, output in zip(chunks, outputs, strict=True):
            self._settle(chunk, output, failure)
        self._listener.step_ended()
        if broken is not None:
            raise broken

    def _report(self, chunks: tuple[Chunk[Prompt], ...], seconds: float) -> None:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self._observer.step(StepReport(seconds, num_tokens, 0, tuple(c.prompt.sequence.spec for c in chunks)))

    def _settle(self, chunk: Chunk[Prompt], output: Sampled | None, failure: InternalError | None) -> None:
        prompt = chunk.prompt
        if prompt in self._leaving:
            self._leaving.discard(prompt)
            self._free(prompt)
        elif failure is not None:
            self._give_up(prompt, failure)
        else:
            self._advance(chunk, output)

    def _advance(self, chunk: Chunk[Prompt], output: Sampled | None) -> None:
        prompt, sequence = chunk.prompt, chunk.prompt.sequence
        start = sequence.num_computed_tokens
        sequence.advance(chunk.num_tokens)
        self._pool.set_filled(sequence.block_table, sequence.num_computed_tokens, from_token=start)
        if output is None:
            self._listener.chunk_computed(prompt)
        elif isinstance(output, BrokenLogits):
            self._give_up(prompt, output.error(sequence.spec.request_id))
        else:
            self._listener.first_token_sampled(prompt, output)
            self.remove(prompt)

    def _give_up(self, prompt: Prompt, error: InternalError) -> None:
        self.remove(prompt)
        self._listener.step_failed(prompt, error)

    def _free(self, prompt: Prompt) -> None:
        blocks = prompt.sequence.take_blocks()
        if blocks:
            self._pool.release(blocks)
            self._wake.set()
