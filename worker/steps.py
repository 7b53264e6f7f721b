"""Keeps the engine stepping: plan, launch, apply the last. Up to two steps are in flight.

    launch k ────────────── wait ──────┬─ k ends: apply k ─┬─ k + 1 ends: apply …
                                       │                   │
             just before k's end: launch k + 1   just before its end: launch k + 2

The engine computes in its own thread; while a step runs, the control loop is free. A second step is launched only if
waiting for the end of the first would not bring a better one (`Source.step_behind`); the tokens it starts from then go
from step to step inside the engine. On a CPU neither of the two computes prompts. On a GPU, which would idle while the
loop plans, both may: prompts go on, and sequences whose result the host must see first sit out.

The second step is planned shortly before the first one is expected to end: earlier, it would leave out requests that
arrive while the first one computes; later, a GPU would wait for the host to launch it. A sequence that turns out to
have ended costs one discarded token. When no sequence can step, the loop sleeps until `wake`.

A step that raises fails the requests in it and nobody else, each once; one whose logits are broken fails alone. Both
may go on elsewhere (`StepFailed`). A broken engine, or a bug in the planning itself, ends `run`, and so the process.

What a step brought is applied by the source of each request, unless the request or its choice has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from engine.engine_thread import EngineBroken
from engine.sequence import Sequence
from engine.step import BrokenLogits, Sampled, ScheduledSeq, Scores, StepFailed, StepResult
from shell.telemetry.events import PrefixLookedUp, Started, StepEnded
from shell.telemetry.logging import get_logger
from shell.thread_work import to_the_end
from tandem.errors import TandemError
from worker.budget import ChunkBudget
from worker.ports import WorkerParts
from worker.releases import BlockReleases
from worker.request import Request
from worker.source import BatchedStep, Owner, Sources

_log = get_logger(__name__)

LEAD_S = 0.002
"""How long before the expected end of a step the next one is planned: longer than planning takes."""
LAUNCH_LEAD_S = 0.005
"""The same where the host plans, lays out, uploads and launches while a device computes. With 2 ms an H200 waited for
its host before many decode steps (bench/LOG.md)."""
LAUNCH_LEAD_SHARE = 0.25
"""At least this share of the expected time: steps with prompts may miss it by so much."""


@dataclass(slots=True)
class _InFlight:
    """A launched step."""

    batched: BatchedStep
    result: asyncio.Future[StepResult]
    started_s: float
    """When the engine began with the step, as far as the loop can tell."""


class StepLoop:
    """Runs until cancelled. All on the control loop."""

    def __init__(
        self,
        sources: Sources,
        parts: WorkerParts,
        budget: ChunkBudget,
        releases: BlockReleases,
        owner: Owner,
        on_step_ended: Callable[[], None],
        *,
        overlap: bool,
    ) -> None:
        """`overlap`: whether a second step may be in flight."""
        self._sources = sources
        self._planner = sources.planner
        self._engine = parts.engine
        self._cache = parts.cache
        self._clock = parts.clock
        self._events = parts.events
        self._guides = parts.guides
        self._budget = budget
        self._releases = releases
        self._owner = owner
        self._on_step_ended = on_step_ended
        self._overlap = overlap
        self._overlap_prompts = overlap and parts.engine.is_asynchronous
        self._in_flight: deque[_InFlight] = deque()
        self._decode_s: float | None = None
        """Duration of the last decode step; None = there was none."""
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Makes the loop look again for work."""
        self._work.set()

    async def run(self) -> None:
        """Steps while there is work, sleeps while there is none. Ends by cancellation, or raises EngineBroken.

        It does not end before every launched step has.
        """
        try:
            while True:
                self._work.clear()
                last = self._in_flight[0] if self._in_flight else None
                has_launched = self._launch(await self._plan(last))
                if last is not None:
                    await self._apply(last)
                elif not has_launched:
                    await self._work.wait()
        finally:
            await self._drain()

    async def _plan(self, last: _InFlight | None) -> BatchedStep | None:
        """Returns the next step: planned at once, or shortly before the last one ends; None = there is none."""
        if self._guides is not None:
            self._guides.start(self.wake)
            if last is None:
                await self._guides.settled()
        if last is None:
            return self._planner.next_step()
        expected_s = self._expected_s(last.batched)
        if expected_s is None:
            return None
        lead_s = max(LAUNCH_LEAD_S, LAUNCH_LEAD_SHARE * expected_s) if self._engine.is_asynchronous else LEAD_S
        timeout_s = last.started_s + expected_s - lead_s - self._clock.now_s()
        if timeout_s > 0:
            await asyncio.wait({last.result}, timeout=timeout_s)
        if last.result.done():
            return None
        return self._planner.step_behind(last.batched, with_prompts=self._overlap_prompts)

    def _expected_s(self, running: BatchedStep) -> float | None:
        """Returns how long a step takes before one may be launched behind it; None = none may be."""
        if running.is_decode:
            return self._decode_s if self._overlap else None
        if not self._overlap_prompts:
            return None
        return self._budget.least_step_s(len(running.rows), running.num_prompt_tokens)

    def _launch(self, batched: BatchedStep | None) -> bool:
        """Launches a step; returns whether there was a step."""
        if batched is None:
            return False
        now_s = self._clock.now_s()
        for request in batched.planned:
            if request.started_s is None:
                self._note_started(request, now_s)
        self._releases.step_launched()
        self._in_flight.append(_InFlight(batched, self._launched(batched), now_s))
        return True

    def _note_started(self, request: Request, now_s: float) -> None:
        request.started_s = now_s
        if request.owes_prefill_done and request.reads_cache:
            request.events.emit(
                PrefixLookedUp(len(request.spec.prefix_token_ids), request.group.prefix.num_cached_tokens)
            )
        request.events.emit(Started())
        if request.for_another and self._sources.prompts is not None:
            self._sources.prompts.started(request)

    def _launched(self, batched: BatchedStep) -> asyncio.Future[StepResult]:
        try:
            return self._engine.launch(batched.step)
        except Exception as error:  # noqa: BLE001 - one way out for all that goes wrong with a step
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    async def _apply(self, last: _InFlight) -> None:
        """Waits for the oldest step in flight, and applies its results."""
        batched = last.batched
        if not last.result.done():
            await asyncio.wait({last.result})  # not the future itself: a cancelled wait must leave the step alone
        self._ended(last)
        try:
            result = last.result.result()
        except EngineBroken as error:
            self._fail(batched, error)
            raise
        except Exception as error:  # noqa: BLE001 - the step's root: one bad batch must not stop the others
            _log.exception("a step failed", num_seqs=len(batched.seqs))
            self._fail(batched, StepFailed.of(error))
        else:
            self._report(batched, result)
            if self._sources.decodes is not None:
                for request in self._sources.decodes.apply_rows(batched, result.drawn):
                    self._break(request)
            chunks = zip(batched.chunks, batched.step.chunks, result.outputs, strict=True)
            for number, ((request, seq), chunk, drawn) in enumerate(chunks):
                if not seq.is_finished:
                    self._apply_chunk(request, seq, chunk, drawn, result.scored.get(number))
        finally:
            self._releases.step_ended()
        self._on_step_ended()

    def _ended(self, last: _InFlight) -> None:
        """Notes the end of the oldest step in flight. The cache hears of it before it is given blocks."""
        self._in_flight.popleft()
        if last.result.exception() is None:
            seconds, num_prompt_tokens = last.result.result().seconds, last.batched.num_prompt_tokens
            self._cache.step_ended(failed=False, seconds=seconds, num_prompt_tokens=num_prompt_tokens)
        else:
            self._cache.step_ended(failed=True)
        if self._in_flight:
            self._in_flight[0].started_s = self._clock.now_s()

    def _fail(self, batched: BatchedStep, error: TandemError) -> None:
        for request, _ in batched.seqs:
            self._owner.end(request, error)

    def _break(self, request: Request) -> None:
        """Ends a request whose logits are broken. Its KV may be the cause, so the cache forgets all of it."""
        self._owner.end(request, BrokenLogits().error(request.spec.request_id))
        for choice in request.group.sequences:
            self._cache.forget(request.spec.cache_salt, choice.token_ids)

    def _apply_chunk(
        self,
        request: Request,
        seq: Sequence,
        chunk: ScheduledSeq,
        drawn: tuple[Sampled, ...],
        scores: Scores | None,
    ) -> None:
        """Applies the results of one chunk. The cache learns of it also if the request has ended: its blocks are held
        until all results are applied.
        """
        tokens = [sampled for sampled in drawn if not isinstance(sampled, BrokenLogits)]
        if len(tokens) < len(drawn) or isinstance(scores, BrokenLogits):
            self._break(request)
            return
        num_tokens = chunk.context_len + len(chunk.token_ids)
        if len(chunk.token_ids) > 1:
            full = chunk.block_table[: num_tokens // self._cache.pool.block_size]
            self._cache.insert(request.spec.cache_salt, seq.token_ids, full)
        if not request.has_ended:
            seq.step_ended(chunk)
            if scores is not None:
                request.take_scores(scores)
            self._sources.of(request).apply(request, seq, tokens)

    def _report(self, batched: BatchedStep, result: StepResult) -> None:
        seconds = result.seconds
        num_rows, num_prompt_tokens = len(batched.rows), batched.num_prompt_tokens
        self._budget.step_took(num_rows, num_prompt_tokens, seconds)
        if batched.is_decode:
            self._decode_s = seconds
        self._events.emit(StepEnded(seconds, num_prompt_tokens, num_rows, num_rows + len(batched.chunks)))

    async def _drain(self) -> None:
        """Waits for the steps in flight, cancelled or not."""
        while self._in_flight:
            last = self._in_flight[0]
            with suppress(Exception, asyncio.CancelledError):
                await to_the_end(last.result)
            self._ended(last)
            self._releases.step_ended()
            self._on_step_ended()
