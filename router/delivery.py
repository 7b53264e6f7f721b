"""The way out of a request: tokens of its choices in, in any order; ordered tokens and their text out.

    push(TokenDelta) ─▶ ChoiceStream: order → text → stop strings → not read yet ─▶ get() ─▶ ChoiceOutput

Tokens come from two workers: the first ones from prefill, the rest from decode, and decode's second may
overtake prefill's first. After a replay a new pair may repeat what is known. What waits for a slow reader is
merged per choice, so nothing upstream waits; `Unread` ends a request of which too much waits, or for too long.
Filled without awaiting, from within a worker's stream; read by the face's own task. Knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from router.choice_stream import MAX_OUTPUT_WEIGHT, ChoiceOutput, ChoiceStream, PromptLogprobs
from router.metrics import Summary
from shell.clock import Clock
from shell.telemetry.events import RequestEvents, TokensArrived
from tandem.errors import InvalidOutput, InvalidRequest, Overloaded, TandemError
from tandem.types import ChoiceSpec, FinishReason, TokenDelta, TokenLogprobs

_ONE_TOKEN = TokensArrived(1)
"""The most frequent event, made once: 0.2 µs per token."""
_BYTES_PER_WEIGHT = 100
"""Memory of a token with its text, and about that of a log-probability."""
_SWEEP_EVERY_S = 0.25
"""Each sweep looks at every request; workers' heartbeats alone would bring hundreds a second."""
_MOST_SHARE = 1 / 4
"""Share of all unread bytes that a single request may have."""


class Delivery:
    """All choices of one request. Single-threaded; at most one reader.

    A choice's last output tells its finish reason; the request's last one leaves together with the summary.
    """

    def __init__(
        self,
        choices: Sequence[ChoiceStream],
        events: RequestEvents,
        prompt_logprobs: PromptLogprobs | None = None,
        interval_s: float = 0.0,
    ) -> None:
        """`prompt_logprobs`, if they are asked for, as yet without any.

        `interval_s`: from when all was read to the next output, unless the request ends. What comes meanwhile is
        merged.
        """
        self._interval_s = interval_s
        self._pauses = False
        self._prompt_logprobs = prompt_logprobs
        self._choices = {choice.index: choice for choice in choices}
        self._events = events
        self._open = dict(self._choices)
        """Choices without their last token."""
        self._unread: dict[int, ChoiceStream] = {}
        """By index, in the order in which they came to have something new."""
        self._summary: Summary | None = None
        self._error: TandemError | None = None
        self.abandoned: TandemError | None = None
        """Why nobody will read the rest."""
        self._news: asyncio.Future[None] | None = None
        self.num_outputs = 0
        """Read so far."""
        self.is_gathered = False
        """Whether the reader takes nothing before the end."""
        self._written_weight = 0
        """Weight of the output that was read last, until the next is asked for."""

    @property
    def being_written(self) -> bool:
        """Whether the reader has an output that has not left yet."""
        return self._written_weight > 0

    @property
    def unread_bytes(self) -> int:
        """About the memory of what has not left yet."""
        unread = self._prompt_weight
        for choice in self._choices.values():
            unread += choice.unread_weight
        return (unread + self._written_weight) * _BYTES_PER_WEIGHT

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether workers are still to tell some."""
        return self._prompt_logprobs is not None and not self._prompt_logprobs.is_complete

    @property
    def finished(self) -> bool:
        """Whether every choice has its last token."""
        return not self._open

    @property
    def open_choices(self) -> tuple[ChoiceSpec, ...]:
        """Unfinished choices, as workers resume them."""
        return tuple(each.spec for each in self._open.values())

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """Reasons of the finished choices, by index."""
        return tuple(each.finish_reason for each in self._choices.values() if each.finish_reason is not None)

    @property
    def has_begun(self) -> bool:
        """Whether anything of the answer has come, log-probabilities of its prompt included."""
        return self.num_tokens > 0 or (self._prompt_logprobs is not None and self._prompt_logprobs.has_begun)

    @property
    def num_tokens(self) -> int:
        """Tokens in order, over all choices."""
        return sum(each.num_tokens for each in self._choices.values())

    def num_tokens_of(self, index: int) -> int:
        """Returns the number of tokens of a choice that have come in order."""
        return self._choices[index].num_tokens

    def push_prompt_logprobs(self, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Takes those of the prompt's tokens from `offset` on, known ones again too. Raises InvalidOutput as `push`."""
        if self._prompt_logprobs is None:
            raise InvalidOutput("log-probabilities of a prompt, which nobody asked for")
        self._prompt_logprobs.push(offset, logprobs)
        if self._open:  # else nobody waits for them any more
            self._wake()

    def push(self, delta: TokenDelta) -> None:
        """Takes tokens from a worker. Those of a finished choice, which workers cannot stop alone, are dropped.

        Raises InvalidOutput, and takes nothing, if they cannot be this request's tokens.
        """
        choice = self._open.get(delta.index)
        if choice is None:
            if delta.index not in self._choices:
                raise InvalidOutput(f"tokens of choice {delta.index}, which nobody asked for")
            return
        if self._prompt_logprobs is not None and delta.offset == 0 and self.lacks_prompt_logprobs:
            raise InvalidOutput("a first token before all log-probabilities of the prompt")
        num_new = choice.push(delta)
        if num_new:
            self._events.emit(TokensArrived(num_new, delta.index) if delta.index or num_new > 1 else _ONE_TOKEN)
        if choice.finish_reason is not None:
            del self._open[delta.index]
        elif not num_new:
            return
        self._unread[delta.index] = choice
        if not self._is_held:
            self._wake()

    def forget_early(self) -> None:
        """Drops what came out of order, from a pair of workers that will not fill the gaps."""
        for choice in self._choices.values():
            choice.forget_early()

    def close(self, summary: Summary) -> None:
        """The request ended well."""
        self._summary = summary
        self._wake()

    def fail(self, error: TandemError) -> None:
        """The request ended badly; what waits is still read before the error."""
        self._error = error
        self._wake()

    def abandon(self, error: TandemError) -> None:
        """It is not read: what waits is dropped, and the reader finds nothing but `error`."""
        for choice in self._choices.values():
            choice.drop_unread()
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.drop_unread()
        self._unread.clear()
        self._open.clear()
        self._summary = None
        self.abandoned = error
        self.fail(error)

    async def get(self) -> ChoiceOutput:
        """What is new of one choice, once there is something. Raises what `fail` was given, after the rest."""
        self._written_weight = 0
        while True:
            if self._prompt_logprobs is not None and self._prompt_weight:
                return self._read_prompt_logprobs()
            if self._unread and not self._is_held:
                return self._read_next()
            if self._error is not None and self._summary is None:
                raise self._error
            await self._wait()

    @property
    def _is_held(self) -> bool:
        """Whether what is new waits: the last output for the summary, any other for the end of a pause."""
        return self._summary is None and self._error is None and (self._pauses or not self._open)

    def _pause(self) -> None:
        self._pauses = True
        asyncio.get_running_loop().call_later(self._interval_s, self._go_on)

    def _go_on(self) -> None:
        self._pauses = False
        if self._unread:
            self._wake()

    async def get_all(self) -> tuple[ChoiceOutput, ...]:
        """Every choice by index, whole, once the request has ended. Raises what `fail` was given."""
        self.is_gathered = True
        while self._summary is None:
            if self._error is not None:
                raise self._error
            await self._wait()
        self._written_weight = 1 + self._prompt_weight + sum(each.unread_weight for each in self._choices.values())
        *others, last = sorted(self._unread)
        self._unread, unread = {}, self._unread
        first, *rest = (*(unread[index].read(None) for index in others), unread[last].read(self._summary))
        prompt = () if self._prompt_logprobs is None else self._prompt_logprobs.read()
        return (first._replace(prompt_logprobs=prompt), *rest)

    @property
    def _prompt_weight(self) -> int:
        return 0 if self._prompt_logprobs is None else self._prompt_logprobs.unread_weight

    def _read_prompt_logprobs(self) -> ChoiceOutput:
        assert self._prompt_logprobs is not None
        before = self._prompt_weight
        prompt = self._prompt_logprobs.read(MAX_OUTPUT_WEIGHT)
        self.num_outputs += 1
        self._written_weight = 1 + before - self._prompt_weight
        return ChoiceOutput(min(self._choices), "", (), prompt_logprobs=prompt)

    def _read_next(self) -> ChoiceOutput:
        """Returns an output of the choice that has waited longest."""
        index, choice = next(iter(self._unread.items()))
        del self._unread[index]
        before = choice.unread_weight
        output = choice.read_some(None if self._unread else self._summary)
        after = choice.unread_weight
        if after:
            self._unread[index] = choice
        elif self._interval_s and not self._unread:
            self._pause()
        self.num_outputs += 1
        self._written_weight = 1 + before - after
        return output

    async def _wait(self) -> None:
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


@dataclass(slots=True, eq=False)
class _Watched:
    delivery: Delivery
    end: Callable[[TandemError], None]
    num_outputs: int
    moved_s: float
    """Time at which the reader was seen last to have taken another output, or to have none to write."""


class Unread:
    """Ends requests whose answers stay in this router: too much of one, too much of all together, or for too long.

    Shared by all requests of a router. Counted is what workers have sent and the connection has not taken. A request
    that is ended releases all that it holds; its caller finds the reason when it reads again.
    """

    def __init__(self, clock: Clock, max_bytes: int, max_s: float) -> None:
        self._clock = clock
        self._max_request_bytes = int(max_bytes * _MOST_SHARE)
        self._max_bytes = max_bytes
        self._max_s = max_s
        self._watched: set[_Watched] = set()
        self._due_s = 0.0

    @contextmanager
    def watching(self, delivery: Delivery, end: Callable[[TandemError], None]) -> Iterator[None]:
        """While inside, `end` may be called, once, with the reason."""
        watched = _Watched(delivery, end, 0, self._clock.now_s())
        self._watched.add(watched)
        try:
            yield
        finally:
            self._watched.discard(watched)

    def sweep_if_due(self) -> None:
        """Sweeps, unless that was done a moment ago."""
        now_s = self._clock.now_s()
        if now_s >= self._due_s:
            self._due_s = now_s + _SWEEP_EVERY_S
            self.sweep()

    def sweep(self) -> None:
        """Ends the requests that are over a bound."""
        now_s = self._clock.now_s()
        left: list[tuple[int, _Watched]] = []
        for watched in tuple(self._watched):
            delivery = watched.delivery
            if not delivery.being_written or delivery.num_outputs != watched.num_outputs:
                watched.num_outputs, watched.moved_s = delivery.num_outputs, now_s
            elif now_s - watched.moved_s > self._max_s:
                self._end(watched, f"its answer was not read for {self._max_s:g} s")
                continue
            unread_bytes = delivery.unread_bytes
            if unread_bytes > self._max_request_bytes and delivery.is_gathered:
                self._end_too_large(watched)
            elif unread_bytes > self._max_request_bytes:
                self._end(watched, f"more than {self._max_request_bytes} bytes of its answer are not read")
            else:
                left.append((unread_bytes, watched))
        total = sum(unread_bytes for unread_bytes, _ in left)
        if total > self._max_bytes:
            left.sort(key=lambda each: each[0])
        while total > self._max_bytes:
            unread_bytes, largest = left.pop()
            total -= unread_bytes
            self._end(largest, f"more than {self._max_bytes} bytes of answers are not read, of which it has the most")

    def _end(self, watched: _Watched, why: str) -> None:
        self._tell(watched, Overloaded(f"the request was ended: {why}"))

    def _end_too_large(self, watched: _Watched) -> None:
        """Refuses a whole answer in a way that is not retried: it would be no smaller the next time."""
        most = self._max_request_bytes
        self._tell(
            watched, InvalidRequest("sampling", f"the whole answer takes more than {most} bytes: ask for a stream")
        )

    def _tell(self, watched: _Watched, error: TandemError) -> None:
        if watched in self._watched:
            self._watched.remove(watched)
            watched.end(error)
