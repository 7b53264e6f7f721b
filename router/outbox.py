"""What one client has not read yet: deltas merge while it is slow, so nothing upstream waits.

Filled without awaiting (from a worker's stream), read by the client's own task. Memory is
bounded by the request's max_tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.choice import ChoiceDelta
from router.timeline import Summary
from tandem.errors import TandemError
from tandem.types import TokenId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Message:
    """One message to the client. `summary` is set on the last one."""

    delta: ChoiceDelta
    summary: Summary | None = None


class Outbox:
    """Single-threaded. The delta that ends the choice leaves together with the summary."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: ChoiceDelta | None = None
        self._summary: Summary | None = None
        self._error: TandemError | None = None
        self._news: asyncio.Future[None] | None = None

    def put(self, delta: ChoiceDelta) -> None:
        """Adds what is new; wakes the reader unless the summary is still to come."""
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        if delta.finish_reason is None:
            self._wake()
        else:
            self._last = delta

    def close(self, summary: Summary) -> None:
        """The request ended well."""
        self._summary = summary
        self._wake()

    def fail(self, error: TandemError) -> None:
        """The request ended badly; what waits is still read before the error."""
        self._error = error
        self._wake()

    async def get(self) -> Message:
        """All that is new, once there is something. Raises what `fail` was given, after the rest."""
        while True:
            if self._summary is not None:
                return self._take()
            if self._error is not None:
                if self._token_ids:
                    return self._take()
                raise self._error
            if self._token_ids and self._last is None:
                return self._take()
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    async def get_all(self) -> Message:
        """Everything in one message, once the request has ended. Raises what `fail` was given."""
        while self._summary is None:
            if self._error is not None:
                raise self._error
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._take()

    def _take(self) -> Message:
        last, summary = self._last, self._summary
        delta = ChoiceDelta(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=last.finish_reason if last and summary else None,
            matched_stop=last.matched_stop if last and summary else None,
        )
        self._text, self._token_ids, self._logprobs = [], [], []
        return Message(delta, summary)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
