"""One request under way: its state, and its tries on one pair of workers after another.

Owns what the request holds anywhere: whatever way it ends, it is released on every worker and the
delivery told. A replay continues each unfinished choice at its next token: workers compute prompt and
emitted tokens again, and sampling is a function of position, so nothing is lost or repeated. From a decode worker that
drains, another one takes the request over with its KV, where there is one; where that fails, a replay follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from router.admission import Admission
from router.assignment import Assignment
from router.attempt import Attempt
from router.choice_stream import ChoiceStream, PromptLogprobs
from router.delivery import Delivery
from router.metrics import RouterMetrics, Timeline
from router.placement import Demand, Placement
from router.prefix_map import Prefix
from router.request_spans import RequestSpans
from router.retries import Retries, RetryPolicy
from router.serving_set import SetId
from router.workers import Workers
from shell.clock import Clock, Deadline, ended_by_deadline
from shell.telemetry.events import Admitted, Placed, RequestBegan, RequestEnded, RouterEvents, TryFailed
from shell.telemetry.logging import get_logger
from shell.telemetry.trace_context import trace_id_of
from tandem.errors import (
    DeadlineExceeded,
    InternalError,
    PrefixNotHeld,
    Reason,
    TandemError,
    TransferError,
    Unavailable,
)
from tandem.lifecycle import REQUEST_MOVES, RequestState, advance
from tandem.types import ChoiceSpec, FinishReason, GroupSpec, TextParams, WorkerInfo

_log = get_logger(__name__)

_ENDED = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """Nothing left to default, nothing left to check."""

    group: GroupSpec
    """With all its choices, and none of their tokens."""
    text: TextParams
    deadline: Deadline
    peer: str
    is_chat: bool = False
    """The prompt came as a chat."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """What every request of a router goes through."""

    workers: Workers
    admission: Admission
    clock: Clock
    policy: RetryPolicy
    metrics: RouterMetrics
    spans: RequestSpans
    events: RouterEvents
    stream_interval_s: float = 0.0
    """Between the messages of a stream; see `Delivery`."""


class Generation:
    """Run `drive` as a task; read `delivery`."""

    def __init__(
        self,
        request: ResolvedRequest,
        choices: Sequence[ChoiceStream],
        rooms: Rooms,
        timeline: Timeline,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self._request = request
        self._rooms = rooms
        self._timeline = timeline
        group = request.group
        begun = RequestBegan(
            request_id=group.request_id,
            num_prompt_tokens=group.num_prompt_tokens,
            sampling=group.sampling,
            priority=group.priority,
            traceparent=group.traceparent,
            num_choices=len(group.choices),
            is_chat=request.is_chat,
        )
        self._traceparent, span = rooms.spans.begin(begun)
        timeline.begin(begun)
        others = () if span is None else (span,)
        self._events = rooms.events.begin(begun, *others, timeline.hear)
        self._names: Any = {"request_id": group.request_id, "trace_id": trace_id_of(self._traceparent)}
        self.delivery = Delivery(choices, self._events, prompt_logprobs, rooms.stream_interval_s)
        """What the client has to read."""
        self._state = RequestState.QUEUED
        self._retries = Retries(rooms.policy)
        self._suspects: list[WorkerInfo] = []
        """Workers on which a step of the request broke."""
        self._set_id: SetId | None = None
        """The set of equal workers that the answer comes from; None = nothing came yet."""
        self._local_if_held = True
        """Whether the next try may trust in what a decode worker seems to hold."""

    async def drive(self) -> None:
        """The request's whole life. Raises nothing but CancelledError; errors go to the delivery.

        One that ended well keeps its place among those that run until it is cancelled: when its answer has left.
        """
        async with AsyncExitStack() as place:
            await self._drive(place)

    async def _drive(self, place: AsyncExitStack) -> None:
        try:
            await self._run(place)
            self._end(RequestState.FINISHED, self.delivery.finish_reasons)
            num_prompt_tokens = self._request.group.num_prompt_tokens
            self.delivery.close(self._timeline.summary(num_prompt_tokens, self.delivery.num_tokens))
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.abandon()
            raise
        except TandemError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (the task's root)
            _log.exception("request failed by a bug", **self._names, peer=self._request.peer)
            self._fail(InternalError(f"{type(error).__name__} in the router"))

    def abandon(self) -> None:
        """Nobody wants it any more. For one whose `drive` may have been cancelled before it began; else a no-op."""
        if self._state in _ENDED:
            return
        passed_s = self._rooms.clock.now_s() - self._timeline.arrived_s
        late = ended_by_deadline(passed_s, self._request.deadline.remaining_s())
        unread, error = self.delivery.abandoned, DeadlineExceeded("the deadline passed") if late else None
        self._end(RequestState.FAILED if unread else RequestState.CANCELLED, error=unread or error)

    async def _run(self, place: AsyncExitStack) -> None:
        group, deadline = self._request.group, self._request.deadline
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                slot = self._rooms.admission.slot(group.num_prompt_tokens, group.priority, deadline)
                await place.enter_async_context(slot)
                self._events.emit(Admitted())
                await self._try_pairs()
        except TimeoutError as error:
            if self.delivery.finished:
                return  # it passed in the wait for the word of how large the hand-off was
            raise DeadlineExceeded(
                f"the deadline passed while {self._state}, after {self.delivery.num_tokens} tokens"
            ) from error

    async def _try_pairs(self) -> None:
        """Tries pairs until one finishes all choices, or too many in a row fail. Raises the last failure.

        What has come of an answer is one model's: all further tries are on workers that are equal to its first ones.
        """
        failure: TandemError | None = None
        while True:
            choices = self.delivery.open_choices
            assignment = await self._place(choices, failure)
            attempt = self._attempt(assignment)
            try:
                await attempt.run(self._resumed(choices))
                while not self.delivery.finished:
                    before, successor = attempt, await self._successor(attempt)
                    if successor is not None:
                        attempt = successor  # whose failure is meant below
                        attempt = await self._moved(successor)
                    if attempt is before:
                        await attempt.stay()
                attempt.went_well()
                self._accuse()
                return
            except PrefixNotHeld:
                # Nobody is to blame: what this router knew of the cache was old.
                self._local_if_held = False
            except TandemError as error:
                # Two workers that do not fit do not get to fit; but others may.
                if not (error.retryable or isinstance(error, TransferError)):
                    raise
                failure = error
                self._local_if_held = True
                if not self._takes(error, attempt, choices):
                    raise
            finally:
                attempt.release()
                self.delivery.forget_early()
                if self._set_id is None and self.delivery.has_begun:
                    self._set_id = SetId.of(attempt.placement.decode)

    def _attempt(self, assignment: Assignment, source: Attempt | None = None) -> Attempt:
        """Returns an attempt that is about to run where it was placed; with `source`, a move from there."""
        placement = assignment.placement
        self._events.emit(Placed(placement.prefill, placement.decode, placement.reason, placement.prefix_at))
        return Attempt(
            assignment,
            self._rooms.workers,
            self.delivery,
            self._events,
            self._rooms.clock,
            self._timeline.arrived_s,
            self._rooms.policy.silence_s,
            self._move,
            self._accuse,
            source,
        )

    async def _successor(self, attempt: Attempt) -> Attempt | None:
        """What is to take over from an attempt that leaves.

        None if no other decode worker takes it now, or if the attempt leaves no more.
        """
        demand = replace(self._demand(self.delivery.open_choices), source=attempt.placement.decode)
        try:
            assignment = await self._rooms.workers.place(demand, 0.0)
        except Unavailable:
            return None
        if not attempt.leaves:
            self._rooms.workers.end(assignment, arrived=False)
            return None
        _log.info(
            "request moves",
            **self._names,
            source=attempt.placement.decode.worker_id,
            target=assignment.placement.decode.worker_id,
        )
        return self._attempt(assignment, attempt)

    async def _moved(self, successor: Attempt) -> Attempt:
        """Runs the successor with all tokens but the last. Returns it, or the attempt before if the move failed.

        Raises what ended both.
        """
        known = tuple(replace(each, output_token_ids=each.output_token_ids[:-1]) for each in self.delivery.open_choices)
        try:
            await successor.run(self._resumed(known))
        except TandemError as error:
            source = successor.give_back()
            if source is None:
                raise
            target = successor.placement.decode
            self._retries.blamed.add(target.incarnation)
            self._blame(successor.placement, target, error)
            _log.info("request stays", **self._names, reason=error.reason)
            return source
        return successor

    def _takes(self, error: TandemError, attempt: Attempt, choices: Sequence[ChoiceSpec]) -> bool:
        """Notes and emits a failed try. Returns whether there may be another one."""
        placement, culprit = attempt.placement, attempt.culprit or attempt.placement.decode
        self._blame(placement, culprit, error)
        self._events.emit(TryFailed(culprit, error))
        _log.warning(
            "request is tried again",
            **self._names,
            culprit=culprit.worker_id,
            reason=error.reason,
            error=error.message,
            num_tokens=self.delivery.num_tokens,
        )
        links = map(self._rooms.workers.link, filter(None, (placement.prefill, placement.decode)))
        lost = error.reason is Reason.WORKER_LOST or not all(link is not None and link.connected for link in links)
        return self._retries.count(error, culprit, placement, lost=lost, progress=self._progress_since(choices))

    def _blame(self, placement: Placement, culprit: WorkerInfo, error: TandemError) -> None:
        """Tells the workers whose failure it was; of a hand-off, nobody knows.

        A worker is blamed for a step that broke only once the request went well elsewhere: a request that breaks on
        every worker is at fault itself, and must not set a whole cluster aside.
        """
        if error.reason is Reason.DRAINING:
            return  # the worker is well, and says so
        if isinstance(error, InternalError):
            self._suspects.append(culprit)
        elif isinstance(error, TransferError) and placement.prefill is not None:
            self._rooms.workers.handoff_failed(placement.prefill, placement.decode)
        else:
            self._rooms.workers.failed(culprit)

    def _accuse(self) -> None:
        while self._suspects:
            self._rooms.workers.failed(self._suspects.pop())

    def _resumed(self, choices: tuple[ChoiceSpec, ...]) -> GroupSpec:
        """What workers are to run now; log-probabilities of the prompt are computed once, unless they came in part."""
        sampling = self._request.group.sampling
        if not self.delivery.lacks_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            self._request.group,
            sampling=sampling,
            choices=choices,
            timeout_s=self._request.deadline.remaining_s(),
            traceparent=self._traceparent,
        )

    def _progress_since(self, choices: Sequence[ChoiceSpec]) -> int:
        """New tokens of the choice that got on most."""
        return max(self.delivery.num_tokens_of(each.index) - len(each.output_token_ids) for each in choices)

    async def _place(self, choices: Sequence[ChoiceSpec], failure: TandemError | None) -> Assignment:
        """A pair, of workers that did not fail this request as far as there are others.

        Raises Unavailable, with MODEL_CHANGED if only workers of another set are left for an answer that has begun;
        or `failure` once there were too many and nobody is left who was not asked.
        """
        demand, retries, workers = self._demand(choices), self._retries, self._rooms.workers
        if failure is not None:
            await asyncio.sleep(retries.pause_s(failure))
        try:
            assignment = await workers.place(demand, 0.0 if retries.are_spent else self._rooms.policy.patience_s)
        except Unavailable as error:
            if failure is None:
                raise
            known = f"{failure.message}, after {self.delivery.num_tokens} tokens; {error.message}"
            if self._set_id is not None and workers.serve_only_without(self._set_id):
                raise Unavailable(known, Reason.MODEL_CHANGED) from error
            if isinstance(failure, Unavailable):
                raise Unavailable(known, failure.reason) from error
            raise failure from error
        if failure is not None and not retries.may_take(assignment.placement):
            self._rooms.workers.end(assignment, arrived=assignment.placement.prefill is None)
            raise failure
        return assignment

    def _demand(self, choices: Sequence[ChoiceSpec]) -> Demand:
        group = self._request.group
        return Demand(
            num_tokens=group.num_prompt_tokens + sum(len(each.output_token_ids) for each in choices),
            max_total_tokens=group.max_total_tokens,
            num_prompt_tokens=group.num_prompt_tokens,
            num_choices=group.sampling.beam_width or len(choices),
            blamed=frozenset(self._retries.blamed),
            prefix=self._prefix(choices),
            local_if_held=self._local_if_held,
            set_id=self._set_id,
        )

    def _prefix(self, choices: Sequence[ChoiceSpec]) -> Prefix | None:
        """What may be found in caches. Log-probabilities of the prompt are not there: it is computed for them, once."""
        if self.delivery.lacks_prompt_logprobs:
            return None
        group = self._request.group
        emitted = choices[0].output_token_ids if len(choices) == 1 else ()
        return Prefix(group.cache_salt, group.prompt_token_ids + emitted)

    def _move(self, state: RequestState) -> None:
        self._state = advance(REQUEST_MOVES, self._state, state)

    def _fail(self, error: TandemError) -> None:
        self._end(RequestState.FAILED, error=error)
        self.delivery.fail(error)

    def _end(
        self, state: RequestState, reasons: tuple[FinishReason, ...] = (), error: TandemError | None = None
    ) -> None:
        self._move(state)
        if error is not None:
            _log.info("request failed", **self._names, reason=error.reason, error=error.message)
        self._events.emit(RequestEnded(self.delivery.num_tokens, reasons, error))
