"""Keeps the engine stepping: plan, launch, wait, apply. Up to two steps are in flight.

    launch k ────────────── wait ──────┬─ k ends: apply k ─┬─ k + 1 ends: apply …
                                       │                   │
             just before k's end: launch k + 1   just before its end: launch k + 2

The engine computes in its own thread; while a step runs, the control loop is free. A second step is launched behind a
decode step only, when that is about to end (`StepTiming`), and only if waiting for its end would not bring a better
one (`RunningBatch.step_behind`); the tokens it starts from then go from step to step inside the engine. A sequence
that turns out to have ended costs one discarded token. When no sequence can step, the loop sleeps until `wake`.

A step that raises fails the requests in it and nobody else, each once; one whose logits are broken fails alone. Both
may go on elsewhere (`StepFailed`). A broken engine, or a bug in the planning itself, ends `run`, and so the process.

What a step brought is applied, unless its request is gone or its choice has ended:

    prompt computed ─▶ prefill_done, first tokens of all choices ─▶ fork; of another worker, see `prompts_for_others`
    decode          ─▶ one token of one choice, or the candidates of one beam
    last token      ─▶ the choice's blocks are released; with the last choice, the request ends

The cache learns of a prompt's blocks when their step has ended, of a completion's when it ends or is preempted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass

from decode_worker.prompts_for_others import PromptsForOthers
from decode_worker.running_batch import BatchedStep, RunningBatch
from engine.beam_group import BeamGroup, candidates_of
from engine.decode_rows import DrawnTokens, objects_of
from engine.engine_thread import EngineBroken
from engine.guides import Guides
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from engine.step import BrokenLogits, Sampled, SampledToken, ScheduledSeq, Scores, StepFailed, StepResult
from engine.thread_work import to_the_end
from shell.clock import Clock
from shell.telemetry.logging import get_logger
from shell.telemetry.observers import StepReport, WorkerObserver
from tandem.errors import TandemError
from tandem.types import TokenId
from worker.ports import RouterPort, StepEngine, TokenColumns
from worker.request import Request

_log = get_logger(__name__)

MIN_LEAD_S = 0.002
_LEAD_IN_PLANS = 2.0
"""How many times the usual planning time a step is launched ahead."""
_WEIGHT_BELOW, _WEIGHT_ABOVE = 0.5, 0.1
"""Of the newest measurement in a moving average, if it lies below or above."""


@dataclass(slots=True)
class _InFlight:
    """A launched step."""

    batched: BatchedStep
    result: asyncio.Future[StepResult]
    started_s: float
    """When the engine began with it, as far as the loop can tell."""


class StepTiming:
    """When to launch a step behind the one in flight: shortly before that is expected to end.

    Launched at once, it would leave out every request that arrives while the first one still computes. Launched too
    late, the engine is idle for as long as planning takes. Steps of similar size take similar time, so moving averages
    of the last ones tell; where times vary, the shorter ones count more.
    """

    def __init__(self, max_planning_share: float) -> None:
        """`max_planning_share`: of a step, that planning the next one may take if it is to overlap with it."""
        self._max_planning_share = max_planning_share
        self._step_s: dict[int, float] = {}
        """By size class: steps of `[2**(c-1), 2**c)` seqs."""
        self._planning_s = 0.0

    def step_took(self, num_seqs: int, seconds: float) -> None:
        """A decode step has ended."""
        size = num_seqs.bit_length()
        self._step_s[size] = _averaged(self._step_s.get(size, seconds), seconds)

    def planning_took(self, seconds: float) -> None:
        """A step was planned and launched."""
        self._planning_s = _averaged(self._planning_s, seconds)

    def launch_after_s(self, num_seqs: int) -> float | None:
        """How long after the start of a decode step of `num_seqs` seqs the next one is to be launched.

        None = no step of this size was seen yet, or planning takes too large a share of it. Not negative.
        """
        expected_s = self._step_s.get(num_seqs.bit_length())
        if expected_s is None or self._planning_s > self._max_planning_share * expected_s:
            return None
        return max(0.0, expected_s - max(MIN_LEAD_S, _LEAD_IN_PLANS * self._planning_s))


def _averaged(average: float, newest: float) -> float:
    weight = _WEIGHT_BELOW if newest < average else _WEIGHT_ABOVE
    return average + weight * (newest - average)


class StepLoop:
    """Runs until cancelled. All on the control loop."""

    def __init__(
        self,
        batch: RunningBatch,
        prompts: PromptsForOthers,
        cache: PrefixCache,
        engine: StepEngine,
        clock: Clock,
        on_ended: Callable[[Request, TandemError | None], None],
        on_step_ended: Callable[[], None],
        observer: WorkerObserver,
        *,
        overlap: bool,
        max_planning_share: float,
        guides: Guides | None = None,
    ) -> None:
        """`on_ended`, called once per request that finished (None) or failed, must make it leave the batch.

        `overlap`: whether a second step may be in flight, if planning it takes no more than `max_planning_share`.
        """
        self._batch = batch
        self._prompts = prompts
        self._cache = cache
        self._engine = engine
        self._clock = clock
        self._on_ended = on_ended
        self._on_step_ended = on_step_ended
        self._observer = observer
        self._overlap = overlap
        self._guides = guides
        self._timing = StepTiming(max_planning_share)
        self._in_flight: deque[_InFlight] = deque()
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Something has changed: look again for work."""
        self._work.set()

    async def run(self) -> None:
        """Steps while there is work, sleeps while there is none. Ends by cancellation, or raises EngineBroken.

        It does not end before every launched step has.
        """
        try:
            while True:
                self._work.clear()
                if self._guides is not None:
                    self._guides.start(self.wake)
                    if not self._in_flight:
                        await self._guides.settled()
                if not self._in_flight and not self._launch(self._batch.next_step):
                    await self._work.wait()
                    continue
                await self._launch_behind()
                await self._end_oldest()
        finally:
            await self._drain()

    def _launch(self, plan: Callable[[], BatchedStep | None]) -> bool:
        """Launches what `plan` returns; False if that is nothing."""
        began_s = self._clock.now_s()
        batched = plan()
        if batched is None:
            return False
        for request, _ in batched.seqs[batched.num_rows :]:
            if request.started_s is None:
                request.started_s = began_s
                if request.owes_prefill_done and request.reads_cache:
                    request.observer.looked_up(
                        len(request.spec.prefix_token_ids), request.group.prefix.num_cached_tokens
                    )
                request.observer.started()
                if request.for_another:
                    self._prompts.started(request)
        self._batch.releases.step_launched()
        result, now_s = self._launched(batched), self._clock.now_s()
        self._in_flight.append(_InFlight(batched, result, now_s))
        self._timing.planning_took(now_s - began_s)
        return True

    def _launched(self, batched: BatchedStep) -> asyncio.Future[StepResult]:
        try:
            return self._engine.launch(batched.step)
        except Exception as error:  # noqa: BLE001 - one way out for all that goes wrong with a step
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    async def _launch_behind(self) -> None:
        """Waits until the step in flight has ended, or launches the next one behind it shortly before."""
        running = self._in_flight[0]
        if not self._overlap or not running.batched.is_decode:
            return
        after_s = self._timing.launch_after_s(len(running.batched.seqs))
        if after_s is None:
            return
        timeout_s = running.started_s + after_s - self._clock.now_s()
        if timeout_s > 0:
            await asyncio.wait({running.result}, timeout=timeout_s)
        if not running.result.done():
            self._launch(lambda: self._batch.step_behind(running.batched))

    async def _end_oldest(self) -> None:
        """Waits for the oldest step in flight and applies what it brought."""
        batched, future = self._in_flight[0].batched, self._in_flight[0].result
        await asyncio.wait({future})  # not the future itself: a cancelled wait must leave the step alone
        self._ended(batched, future)
        try:
            result = future.result()
        except EngineBroken as error:
            self._fail(batched, error)
            raise
        except Exception as error:  # noqa: BLE001 - the step's root: one bad batch must not stop the others
            _log.exception("a step failed", num_seqs=len(batched.seqs))
            self._fail(batched, StepFailed.of(error))
        else:
            for number, scores in result.scored.items():
                self._tell_scores(batched.seqs[number][0], scores)
            num_rows, objects = batched.num_rows, objects_of(batched.step.seqs)
            if num_rows:
                self._apply_rows(batched.seqs[:num_rows], result.outputs)
            others = zip(batched.seqs[num_rows:], objects, result.outputs[num_rows:], strict=True)
            for (request, seq), scheduled, drawn in others:
                if request in self._batch and not seq.is_finished:
                    self._apply(request, seq, scheduled, drawn)
            self._report(batched, result)
        self._on_step_ended()

    def _ended(self, batched: BatchedStep, future: asyncio.Future[StepResult]) -> None:
        """The oldest step in flight has: the cache hears of it before it is given the blocks that waited for that."""
        self._in_flight.popleft()
        if future.exception() is None:
            self._cache.step_ended(
                failed=False, seconds=future.result().seconds, num_prompt_tokens=batched.num_prompt_tokens
            )
        else:
            self._cache.step_ended(failed=True)
        self._batch.releases.step_ended()
        if self._in_flight:
            self._in_flight[0].started_s = self._clock.now_s()

    def _fail(self, batched: BatchedStep, error: TandemError) -> None:
        for request, _ in batched.seqs:
            if request in self._batch:
                self._on_ended(request, error)

    def _break(self, request: Request, broken: BrokenLogits) -> None:
        """The KV that was attended to may be what is broken: none of the request's is known any more."""
        self._on_ended(request, broken.error(request.spec.request_id))
        for choice in request.group.sequences:
            self._cache.forget(request.spec.cache_salt, choice.token_ids)

    def _tell_scores(self, request: Request, scores: Scores) -> None:
        if request not in self._batch:
            return
        if isinstance(scores, BrokenLogits):
            self._break(request, scores)
        else:
            request.take_scores(scores)

    def _apply_rows(self, rows: SequenceOf[tuple[Request, Sequence]], outputs: SequenceOf[tuple[Sampled, ...]]) -> None:
        """One token for each of `rows`, whose outputs are the first ones: what `_apply` comes to, for these."""
        here = self._batch.requests
        if isinstance(outputs, DrawnTokens):
            self._apply_drawn(rows, outputs.token_ids)
            return
        for (request, seq), (sampled,) in zip(rows, outputs, strict=False):
            if seq.finish_reason is not None or request not in here:
                continue
            if isinstance(sampled, BrokenLogits):
                self._break(request, sampled)
                continue
            seq.num_ended_tokens += 1
            if request.take_token(seq, sampled[0]) is not None:
                self._on_ended(request, None)

    def _apply_drawn(self, rows: SequenceOf[tuple[Request, Sequence]], token_ids: SequenceOf[TokenId]) -> None:
        """The same where nothing but a token came of each: told together, but for those that end with theirs."""
        here = self._batch.requests
        told: dict[RouterPort, TokenColumns] = defaultdict(TokenColumns)
        ended: list[Request] = []
        for (request, seq), token_id in zip(rows, token_ids, strict=True):
            if seq.finish_reason is not None or request not in here:
                continue
            request.num_sampled_tokens += 1
            finish_reason, offset = seq.append_decoded(token_id), seq.num_output_tokens - 1
            if finish_reason is None:
                columns = told[request.router]
                columns.handles.append(request.handle)
                columns.indexes.append(seq.index)
                columns.offsets.append(offset)
                columns.token_ids.append(token_id)
            else:
                request.router.token(request.handle, seq.index, offset, SampledToken(token_id, None), finish_reason)
                ended.append(request)
        for router, columns in told.items():
            router.tokens(columns)
        for request in ended:
            self._on_ended(request, None)

    def _apply(self, request: Request, seq: Sequence, scheduled: ScheduledSeq, drawn: tuple[Sampled, ...]) -> None:
        broken = next((sampled for sampled in drawn if isinstance(sampled, BrokenLogits)), None)
        if broken is not None:
            self._break(request, broken)
            return
        tokens = [sampled for sampled in drawn if not isinstance(sampled, BrokenLogits)]
        group = request.group
        seq.step_ended(scheduled)
        if len(scheduled.token_ids) > 1:
            group.remember_sequence(seq, self._cache)
        ends_prefix = not group.is_forked and (bool(drawn) or seq.num_remaining_tokens == 0)
        if request.for_another:
            self._prompts.chunk_computed(request, tokens if ends_prefix else None)
            return
        if ends_prefix and request.owes_prefill_done:
            request.owes_prefill_done = False
            request.prompt_computed(self._clock.now_s())
        if tokens:
            self._take(request, seq, tokens)
        if ends_prefix and not group.is_forked:
            group.fork(self._cache.pool)
            group.follow(self._cache)
        if group.is_finished:
            self._on_ended(request, None)
        elif seq.is_finished:
            self._batch.choice_ended(request, seq)

    def _take(self, request: Request, seq: Sequence, drawn: list[tuple[SampledToken, ...]]) -> None:
        """One token for each choice that draws from `seq`, or the candidates of a beam."""
        group = request.group
        if not isinstance(group, BeamGroup):
            for choice, (token,) in zip(seq.drawers, drawn, strict=True):
                request.take_token(choice, token)
            self._follow(request, seq.drawers)
            return
        self._batch.releases.release(group.draw(seq, candidates_of(drawn[0]), self._cache.pool))
        if group.is_finished:
            request.tell_found(group)
        else:
            self._follow(request, group.sequences)

    def _follow(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """Those with new tokens wait for their next masks, if they have a grammar."""
        if self._guides is not None and request.spec.sampling.constraint is not None:
            self._guides.follow(each.guide for each in sequences)

    def _report(self, batched: BatchedStep, result: StepResult) -> None:
        seconds = result.seconds
        self._batch.budget.step_took(batched.num_decodes, batched.num_prompt_tokens, seconds)
        if batched.is_decode:
            self._timing.step_took(len(batched.seqs), seconds)
        specs = tuple([request.spec for request, _ in batched.seqs])
        self._observer.step(StepReport(seconds, batched.num_prompt_tokens, batched.num_decodes, specs))

    async def _drain(self) -> None:
        """Waits for what is in flight, cancelled or not."""
        while self._in_flight:
            with suppress(Exception, asyncio.CancelledError):
                await to_the_end(self._in_flight[0].result)
            self._ended(self._in_flight[0].batched, self._in_flight[0].result)
            self._on_step_ended()
