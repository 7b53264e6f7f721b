"""One request under way: its state, its tokens, and its tries on one pair of workers after another.

Owns what the request holds anywhere: whatever way it ends, every leg is released and the
outbox told. A replay continues at the next token: workers compute prompt and emitted tokens
anew, and sampling is a function of position, so nothing is lost or repeated.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.admission import Admission
from router.attempt import Attempt
from router.choice import Choice
from router.outbox import Outbox
from router.placement import Demand, Placement
from router.request import GenerationRequest
from router.stream import TokenStream
from router.timeline import Timeline
from router.workers import Workers
from tandem.clock import Clock, ended_by_deadline
from tandem.errors import DeadlineExceeded, InternalError, Overloaded, TandemError, TransferError, Unavailable
from tandem.lifecycle import REQUEST_MOVES, RequestState, advance
from tandem.telemetry.logging import get_logger
from tandem.telemetry.observers import RequestEnd, RequestObserver, RequestStart, RouterObserver
from tandem.telemetry.observers_together import RequestTogether
from tandem.telemetry.trace_context import trace_id_of
from tandem.types import FinishReason, Incarnation, TokenDelta

_log = get_logger(__name__)

_ENDED = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request bears with what."""

    max_retries: int = 2
    """Further pairs tried after the first."""
    placement_s: float = 1.0
    """Wait for a pair of workers to be there."""
    silence_s: float = 120.0
    """Longest time without a word about a sequence from its workers, or while it waits in line
    without a step of the worker's engine."""
    progress_tokens: int = 16
    """New tokens by which a pair that failed was still a good one: the count of tries begins anew.

    More than one: prefill gives a token even where no hand-off works. Not much more, but enough that
    a sequence which kills its workers does not go on killing them."""
    total_s: float = 3600.0
    """Deadline of a request that brings none, or a later one."""
    overload_backoff_s: float = 0.1
    """Pause before a full worker is asked again, times the number of tries."""


class Generation:
    """Run `drive` as a task; read `outbox`. A Sink of its attempts."""

    def __init__(
        self,
        request: GenerationRequest,
        choice: Choice,
        workers: Workers,
        admission: Admission,
        clock: Clock,
        patience: Patience,
        timeline: Timeline,
        observer: RouterObserver,
    ) -> None:
        self._request = request
        self._choice = choice
        self._workers = workers
        self._admission = admission
        self._clock = clock
        self._patience = patience
        self._timeline = timeline
        self._observer: RequestObserver = RequestTogether(
            observer.request(_start_of(request, timeline.total_s)), timeline
        )
        self._finish_reason: FinishReason | None = None
        self._stream = TokenStream()
        self._state = RequestState.QUEUED
        self._outbox = Outbox()
        self._disappointing: set[Incarnation] = set()
        """Workers that failed it since it last got on: asked again only where there are no others."""

    @property
    def outbox(self) -> Outbox:
        """What the client has to read."""
        return self._outbox

    @property
    def state(self) -> RequestState:
        """Where the request is."""
        return self._state

    @property
    def finished(self) -> bool:
        """Whether the choice has its last token."""
        return self._choice.finished

    @property
    def num_tokens_in_order(self) -> int:
        """Completion tokens known without a gap."""
        return self._stream.next_offset

    def push(self, delta: TokenDelta) -> None:
        """Takes tokens from a worker; they reach the outbox before this returns."""
        for ready in self._stream.push(delta):
            if self._choice.finished:
                return
            news = self._choice.feed(ready)
            self._finish_reason = news.finish_reason
            if news.token_ids:
                self._observer.tokens(len(news.token_ids))
            self._outbox.put(news)

    async def drive(self) -> None:
        """The request's whole life. Raises nothing but CancelledError; errors go to the outbox."""
        try:
            await self._run()
            self._move(RequestState.FINISHED)
            self._observer.ended(self._end(finish_reason=self._finish_reason))
            self._outbox.close(self._timeline.summary(len(self._request.prompt), self._choice.num_tokens))
        except asyncio.CancelledError:
            self.abandon()
            raise
        except TandemError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (the task's root)
            _log.exception("request failed by a bug", request_id=self._request.request_id)
            self._fail(InternalError(f"{type(error).__name__} in the router"))

    def abandon(self) -> None:
        """Nobody wants it any more. For one whose `drive` may have been cancelled before it began; else a no-op."""
        if self._state in _ENDED:
            return
        passed_s = self._clock.now_s() - self._timeline.arrived_s
        late = ended_by_deadline(passed_s, self._request.deadline.remaining_s())
        error = DeadlineExceeded("the deadline passed") if late else None
        self._move(RequestState.CANCELLED)
        self._observer.ended(self._end(error=error))

    async def _run(self) -> None:
        request = self._request
        try:
            async with asyncio.timeout(request.deadline.remaining_s()):
                async with self._admission.slot(len(request.prompt), request.priority, request.deadline):
                    self._observer.admitted()
                    await self._try_pairs()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the deadline passed while {self._state}, after {self._choice.num_tokens} tokens"
            ) from error

    async def _try_pairs(self) -> None:
        """Tries pairs until one brings the sequence to its end, or too many in a row fail. Raises the last failure."""
        failure: TandemError | None = None
        num_tries = 0
        while failure is None or num_tries <= self._patience.max_retries:
            placement = await self._place(failure)
            attempt = self._attempt(placement)
            first_offset = self._stream.next_offset
            try:
                await attempt.run(self._request.spec(self._stream.token_ids, self._observer.traceparent))
                return
            except TandemError as error:
                if not error.retryable:
                    raise
                failure = error
                if self._stream.next_offset - first_offset >= self._patience.progress_tokens:
                    num_tries = 0
                    self._disappointing.clear()
                num_tries += 1
                self._blame(attempt, placement, error)
            finally:
                attempt.release()
                self._stream.forget_waiting()
            if isinstance(failure, Overloaded):
                await asyncio.sleep(self._patience.overload_backoff_s * num_tries)
        raise failure

    def _attempt(self, placement: Placement) -> Attempt:
        self._observer.placed(placement.prefill, placement.decode)
        return Attempt(
            placement,
            self._workers,
            self,
            self._observer,
            self._clock,
            self._timeline.arrived_s,
            self._patience.silence_s,
            self._move,
        )

    async def _place(self, failure: TandemError | None) -> Placement:
        """A pair, of workers that did not fail this request as far as there are others. Raises Unavailable."""
        try:
            return await self._workers.place(self._demand(), self._patience.placement_s)
        except Unavailable as error:
            if failure is None:
                raise
            known = f"{failure.message}, after {self._choice.num_tokens} tokens; {error.message}"
            if isinstance(failure, Unavailable):
                raise Unavailable(known, failure.reason) from error
            raise failure from error

    def _demand(self) -> Demand:
        request = self._request
        return Demand(
            num_tokens=len(request.prompt) + self._stream.next_offset,
            max_total_tokens=len(request.prompt) + request.sampling.max_tokens,
            blamed=frozenset(self._disappointing),
        )

    def _blame(self, attempt: Attempt, placement: Placement, error: TandemError) -> None:
        culprit = attempt.culprit or placement.decode
        # A hand-off that failed does not say which side was at fault; any other failure is its worker's own.
        pair = (placement.decode, placement.prefill or placement.decode)
        at_fault = pair if isinstance(error, TransferError) else (culprit,)
        self._disappointing.update(each.incarnation for each in at_fault)
        self._observer.moved(culprit, error)
        _log.warning(
            "request moves to another pair",
            request_id=self._request.request_id,
            trace_id=trace_id_of(self._observer.traceparent),
            culprit=culprit.worker_id,
            reason=error.reason,
            error=error.message,
            num_tokens=self._stream.next_offset,
        )

    def _move(self, state: RequestState) -> None:
        self._state = advance(REQUEST_MOVES, self._state, state)

    def _fail(self, error: TandemError) -> None:
        self._move(RequestState.FAILED)
        self._observer.ended(self._end(error=error))
        self._outbox.fail(error)

    def _end(self, *, finish_reason: FinishReason | None = None, error: TandemError | None = None) -> RequestEnd:
        return RequestEnd(self._choice.num_tokens, self._timeline.total_s, finish_reason, error)


def _start_of(request: GenerationRequest, age_s: float) -> RequestStart:
    return RequestStart(
        request_id=request.request_id,
        num_prompt_tokens=len(request.prompt),
        max_tokens=request.sampling.max_tokens,
        priority=request.priority,
        traceparent=request.traceparent,
        age_s=age_s,
    )
