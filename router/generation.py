"""One request under way: its state, and its tries on one pair of workers after another.

Owns what the request holds anywhere: whatever way it ends, it is released on every worker and the
delivery told. A replay continues each unfinished choice at its next token: workers compute prompt and
emitted tokens again, and sampling is a function of position, so nothing is lost or repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.admission import Admission
from router.attempt import Attempt
from router.delivery import ChoiceStream, Delivery
from router.metrics import Timeline
from router.placement import Demand, Placement
from router.workers import Workers
from tandem.clock import Clock, Deadline, ended_by_deadline
from tandem.errors import DeadlineExceeded, InternalError, Overloaded, TandemError, TransferError, Unavailable
from tandem.lifecycle import REQUEST_MOVES, RequestState, advance
from tandem.telemetry.logging import get_logger
from tandem.telemetry.observers import RequestEnd, RequestStart, RouterObserver, request_observers
from tandem.telemetry.trace_context import trace_id_of
from tandem.types import ChoiceSpec, FinishReason, GroupSpec, Incarnation, TextParams

_log = get_logger(__name__)

_ENDED = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a request waits for what, and how often it is tried again."""

    max_retries: int = 2
    """Further pairs tried after the first."""
    placement_s: float = 1.0
    """Wait for a pair of workers to be there."""
    silence_s: float = 120.0
    """Longest time without a word about a request from one of the workers that hold it. Where it waits, they say so
    every few seconds (`worker.waits`)."""
    progress_tokens: int = 16
    """New tokens of one choice by which a pair that failed was still a good one: tries are counted from 0 again.

    More than one: prefill gives a token even where no hand-off works. Not much more, but enough that
    a request which kills its workers does not go on killing them."""
    total_s: float = 3600.0
    """Deadline of a request that brings none, or a later one."""
    overload_backoff_s: float = 0.1
    """Pause before a full worker is asked again, times the number of tries."""


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """Nothing left to default, nothing left to check."""

    group: GroupSpec
    """With all its choices, and none of their tokens."""
    text: TextParams
    deadline: Deadline
    peer: str


@dataclass(frozen=True, slots=True)
class Rooms:
    """What every request of a router goes through."""

    workers: Workers
    admission: Admission
    clock: Clock
    policy: RetryPolicy
    observer: RouterObserver


class Generation:
    """Run `drive` as a task; read `delivery`."""

    def __init__(
        self, request: ResolvedRequest, choices: Sequence[ChoiceStream], rooms: Rooms, timeline: Timeline
    ) -> None:
        self._request = request
        self._rooms = rooms
        self._policy = rooms.policy
        self._timeline = timeline
        group = request.group
        start = RequestStart(
            request_id=group.request_id,
            num_prompt_tokens=group.num_prompt_tokens,
            max_tokens=group.sampling.max_tokens,
            priority=group.priority,
            traceparent=group.traceparent,
            age_s=timeline.total_s,
            num_choices=len(group.choices),
        )
        self._observer = request_observers(rooms.observer.request(start), timeline)
        self.delivery = Delivery(choices, self._observer)
        """What the client has to read."""
        self._state = RequestState.QUEUED
        self._disappointing: set[Incarnation] = set()
        """Workers that failed it since it last made progress: asked again only where there are no others."""

    async def drive(self) -> None:
        """The request's whole life. Raises nothing but CancelledError; errors go to the delivery."""
        try:
            await self._run()
            self._end(RequestState.FINISHED, self.delivery.finish_reasons)
            num_prompt_tokens = self._request.group.num_prompt_tokens
            self.delivery.close(self._timeline.summary(num_prompt_tokens, self.delivery.num_tokens))
        except asyncio.CancelledError:
            self.abandon()
            raise
        except TandemError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (the task's root)
            _log.exception(
                "request failed by a bug", request_id=self._request.group.request_id, peer=self._request.peer
            )
            self._fail(InternalError(f"{type(error).__name__} in the router"))

    def abandon(self) -> None:
        """Nobody wants it any more. For one whose `drive` may have been cancelled before it began; else a no-op."""
        if self._state in _ENDED:
            return
        passed_s = self._rooms.clock.now_s() - self._timeline.arrived_s
        late = ended_by_deadline(passed_s, self._request.deadline.remaining_s())
        error = DeadlineExceeded("the deadline passed") if late else None
        self._end(RequestState.CANCELLED, error=error)

    async def _run(self) -> None:
        group, deadline = self._request.group, self._request.deadline
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                async with self._rooms.admission.slot(group.num_prompt_tokens, group.priority, deadline):
                    self._observer.admitted()
                    await self._try_pairs()
        except TimeoutError as error:
            if self.delivery.finished:
                return  # it passed in the wait for the word of how large the hand-off was
            raise DeadlineExceeded(
                f"the deadline passed while {self._state}, after {self.delivery.num_tokens} tokens"
            ) from error

    async def _try_pairs(self) -> None:
        """Tries pairs until one finishes all choices, or too many in a row fail. Raises the last failure."""
        failure: TandemError | None = None
        num_tries = 0
        while failure is None or num_tries <= self._policy.max_retries:
            choices = self.delivery.open_choices
            placement = await self._place(choices, failure)
            self._observer.placed(placement.prefill, placement.decode)
            attempt = Attempt(
                placement,
                self._rooms.workers,
                self.delivery,
                self._observer,
                self._rooms.clock,
                self._timeline.arrived_s,
                self._policy.silence_s,
                self._move,
            )
            try:
                await attempt.run(self._resumed(choices))
                return
            except TandemError as error:
                if not error.retryable:
                    raise
                failure = error
                if self._progress_since(choices) >= self._policy.progress_tokens:
                    num_tries = 0
                    self._disappointing.clear()
                num_tries += 1
                self._blame(attempt, placement, error)
            finally:
                attempt.release()
                self.delivery.forget_early()
            if isinstance(failure, Overloaded):
                await asyncio.sleep(self._policy.overload_backoff_s * num_tries)
        raise failure

    def _resumed(self, choices: tuple[ChoiceSpec, ...]) -> GroupSpec:
        """What workers are to run now."""
        return replace(
            self._request.group,
            choices=choices,
            timeout_s=self._request.deadline.remaining_s(),
            traceparent=self._observer.traceparent,
        )

    def _progress_since(self, choices: Sequence[ChoiceSpec]) -> int:
        """New tokens of the choice that got on most."""
        return max(self.delivery.num_tokens_of(each.index) - len(each.output_token_ids) for each in choices)

    async def _place(self, choices: Sequence[ChoiceSpec], failure: TandemError | None) -> Placement:
        """A pair, of workers that did not fail this request as far as there are others. Raises Unavailable."""
        group = self._request.group
        demand = Demand(
            num_tokens=group.num_prompt_tokens + sum(len(each.output_token_ids) for each in choices),
            max_total_tokens=group.max_total_tokens,
            num_prompt_tokens=group.num_prompt_tokens,
            num_choices=len(choices),
            blamed=frozenset(self._disappointing),
        )
        try:
            return await self._rooms.workers.place(demand, self._policy.placement_s)
        except Unavailable as error:
            if failure is None:
                raise
            known = f"{failure.message}, after {self.delivery.num_tokens} tokens; {error.message}"
            if isinstance(failure, Unavailable):
                raise Unavailable(known, failure.reason) from error
            raise failure from error

    def _blame(self, attempt: Attempt, placement: Placement, error: TandemError) -> None:
        culprit = attempt.culprit or placement.decode
        # A hand-off that failed does not say which side was at fault; any other failure is its worker's own.
        pair = (placement.decode, placement.prefill or placement.decode)
        at_fault = pair if isinstance(error, TransferError) else (culprit,)
        self._disappointing.update(each.incarnation for each in at_fault)
        self._observer.moved(culprit, error)
        _log.warning(
            "request moves to another pair",
            request_id=self._request.group.request_id,
            trace_id=trace_id_of(self._observer.traceparent),
            culprit=culprit.worker_id,
            reason=error.reason,
            error=error.message,
            num_tokens=self.delivery.num_tokens,
        )

    def _move(self, state: RequestState) -> None:
        self._state = advance(REQUEST_MOVES, self._state, state)

    def _fail(self, error: TandemError) -> None:
        self._end(RequestState.FAILED, error=error)
        self.delivery.fail(error)

    def _end(
        self, state: RequestState, reasons: tuple[FinishReason, ...] = (), error: TandemError | None = None
    ) -> None:
        self._move(state)
        self._observer.ended(RequestEnd(self.delivery.num_tokens, self._timeline.total_s, reasons, error))
