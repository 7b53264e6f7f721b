"""One router's stream as a worker sees it: a `RouterPort` that writes what it is told into messages at once.

    reserved · prefill_started · prefill_done ─▶ answers ┐
    prompt_logprobs · leaving                 ─▶ answers │
    token · token_rows                        ─▶ tokens  ├─ take ─▶ the stream's writer, in this order
    handoff_done · failed                     ─▶ ends    │
    waiting                                   ─▶ waits   │
    what the cache holds                      ─▶ news    ┘

A token is a row of the pending StepOutputs. While the writer waits for a slow router, the rows of more steps join that
message, until it has reached its size and the next one begins.
Never awaits: memory is bounded by what the requests themselves may generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from engine.step import SampledToken
from tandem.convert import failed_to_proto, finish_reason_to_proto, logprobs_to_proto, wait_reason_to_proto
from tandem.errors import TandemError
from tandem.types import UNKNOWN_ROUTE, FinishReason, Handle, Incarnation, KvRoute, TokenLogprobs, WaitReason
from tandem.v1 import worker_pb2
from worker.ports import TokenColumns, TokenExtra
from worker.serving.cache_reports import CacheNews

MAX_TOKENS_PER_MESSAGE = 16384
_TOKENS_PER_LOGPROB = 4
"""What a reported alternative weighs against a bare token, in encoded bytes."""

_ByHandle: TypeAlias = dict[Handle, list[worker_pb2.ConnectResponse]]


class RouterSession:
    """Handed to the worker's core with every request of this router, and emptied by one writer task."""

    def __init__(self, router_incarnation: Incarnation) -> None:
        self.router_incarnation = router_incarnation
        self._open: set[Handle] = set()
        self._answers: _ByHandle = {}
        self._tokens = _PendingTokens()
        self._ends: _ByHandle = {}
        self._waits: dict[WaitReason, worker_pb2.ConnectResponse] = {}
        self._filled = asyncio.Event()
        self.cache_news = CacheNews(self._take_cache_news)
        """What this router has still to learn of the cache."""
        self._cache_news_is_due = False

    # --- from the core (RouterPort) ---

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        """See `worker.ports.RouterPort`."""
        message = worker_pb2.Reserved(handle=handle, ticket=ticket, kv_endpoint=kv_endpoint, held_tokens=held_tokens)
        self._add(self._answers, handle, worker_pb2.ConnectResponse(reserved=message))

    def prefill_started(self, handle: Handle) -> None:
        """See `worker.ports.RouterPort`."""
        message = worker_pb2.PrefillStarted(handle=handle)
        self._add(self._answers, handle, worker_pb2.ConnectResponse(prefill_started=message))

    def prefill_done(self, handle: Handle, queue_s: float, prefill_s: float, cached_tokens: int = 0) -> None:
        """See `worker.ports.RouterPort`."""
        message = worker_pb2.PrefillDone(
            handle=handle, queue_seconds=queue_s, prefill_seconds=prefill_s, cached_tokens=cached_tokens
        )
        self._add(self._answers, handle, worker_pb2.ConnectResponse(prefill_done=message))

    def prompt_logprobs(self, handle: Handle, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """See `worker.ports.RouterPort`."""
        per_token = _TOKENS_PER_LOGPROB * (1 + max((len(each.top) for each in logprobs), default=0))
        count = max(1, MAX_TOKENS_PER_MESSAGE // per_token)
        for start in range(0, len(logprobs), count):
            part = [logprobs_to_proto(each) for each in logprobs[start : start + count]]
            message = worker_pb2.PromptLogprobs(handle=handle, offset=offset + start, logprobs=part)
            self._add(self._answers, handle, worker_pb2.ConnectResponse(prompt_logprobs=message))

    def token(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None = None,
    ) -> None:
        """See `worker.ports.RouterPort`."""
        is_bare = token.logprobs is None and finish_reason is None and score is None
        extra = None if is_bare else TokenExtra(token.logprobs, finish_reason, score)
        columns = TokenColumns()
        columns.add(handle, index, offset, token.token_id, extra)
        self.token_rows(columns)

    def token_rows(self, columns: TokenColumns) -> None:
        """See `worker.ports.RouterPort`."""
        self._tokens.add(columns if self._open.issuperset(columns.handles) else columns.of(self._open))
        self._filled.set()

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float, route: KvRoute = UNKNOWN_ROUTE) -> None:
        """See `worker.ports.RouterPort`."""
        message = worker_pb2.HandoffDone(
            handle=handle,
            transfer_bytes=num_bytes,
            transfer_seconds=seconds,
            transport=route.transport,
            passed_over=route.passed_over,
        )
        self._add(self._ends, handle, worker_pb2.ConnectResponse(handoff_done=message))

    def leaving(self, handle: Handle) -> None:
        """See `worker.ports.RouterPort`."""
        self._add(self._answers, handle, worker_pb2.ConnectResponse(leaving=worker_pb2.Leaving(handle=handle)))

    def waiting(self, reason: WaitReason, handles: Sequence[Handle]) -> None:
        """See `worker.ports.RouterPort`."""
        message = worker_pb2.Waiting(reason=wait_reason_to_proto(reason), handles=handles)
        self._waits[reason] = worker_pb2.ConnectResponse(waiting=message)
        self._filled.set()

    def failed(self, handle: Handle, error: TandemError) -> None:
        """See `worker.ports.RouterPort`."""
        self._add(self._ends, handle, worker_pb2.ConnectResponse(failed=failed_to_proto(handle, error)))
        self._open.discard(handle)

    # --- from the stream ---

    def open_handle(self, handle: Handle) -> bool:
        """A new request; False if the handle is in use."""
        if handle in self._open:
            return False
        self._open.add(handle)
        return True

    def close_handle(self, handle: Handle) -> None:
        """The router wants nothing more of it: what has not been taken is dropped."""
        self._open.discard(handle)
        self._answers.pop(handle, None)
        self._tokens.discard(handle)
        self._ends.pop(handle, None)

    async def wait(self) -> None:
        """Returns when there may be something to take."""
        await self._filled.wait()

    def take(self) -> list[worker_pb2.ConnectResponse]:
        """Everything, in the order to be written; of what the cache holds, a part."""
        answers, self._answers = self._answers, {}
        tokens, self._tokens = self._tokens, _PendingTokens()
        ends, self._ends = self._ends, {}
        waits, self._waits = self._waits, {}
        self._filled.clear()
        return [*_flat(answers), *tokens.messages(), *_flat(ends), *waits.values(), *self._cache_changes()]

    def _cache_changes(self) -> Iterator[worker_pb2.ConnectResponse]:
        """One message at most: tokens do not wait for all that a large cache has to tell."""
        if self._cache_news_is_due:
            self._cache_news_is_due = False
            if (changes := self.cache_news.take()) is not None:
                yield worker_pb2.ConnectResponse(cache_changes=changes)

    def _take_cache_news(self) -> None:
        self._cache_news_is_due = True
        self._filled.set()

    def _add(self, to: _ByHandle, handle: Handle, response: worker_pb2.ConnectResponse) -> None:
        if handle in self._open:
            to.setdefault(handle, []).append(response)
            self._filled.set()


class _PendingTokens:
    """Tokens that have not been taken, as the columns of the messages that will carry them.

    INVARIANT: the tokens of a choice come without a gap (checked by the router, test_router_session).
    """

    __slots__ = ("_messages", "_weight")

    def __init__(self) -> None:
        self._messages: list[TokenColumns] = []
        self._weight = 0
        """Weight of the last message."""

    def add(self, columns: TokenColumns) -> None:
        """Appends rows to the last message, or begins a new one with them if that is full; takes `columns` over."""
        if not self._messages or self._weight >= MAX_TOKENS_PER_MESSAGE:
            self._messages.append(columns)
            self._weight = 0
        else:
            self._messages[-1].extend(columns)
        self._weight += len(columns.handles)
        for extra in columns.extras.values():
            if extra.logprobs is not None:
                self._weight += _TOKENS_PER_LOGPROB * (1 + len(extra.logprobs.top))

    def discard(self, handle: Handle) -> None:
        """Drops the rows of a request."""
        for number, columns in enumerate(self._messages):
            if handle in columns.handles:
                self._messages[number] = columns.of({*columns.handles} - {handle})

    def messages(self) -> Iterator[worker_pb2.ConnectResponse]:
        """Yields a message for all columns that have a row, oldest first."""
        for columns in self._messages:
            if columns.handles:
                yield worker_pb2.ConnectResponse(step_outputs=columns_to_proto(columns))


def columns_to_proto(columns: TokenColumns) -> worker_pb2.StepOutputs:
    """Returns the message that carries these rows."""
    step = worker_pb2.StepOutputs(handles=columns.handles, offsets=columns.offsets, token_ids=columns.token_ids)
    if any(columns.indexes):
        step.indexes.extend(columns.indexes)
    for row, (logprobs, finish_reason, score) in columns.extras.items():
        step.extras.add(
            row=row,
            logprobs=None if logprobs is None else logprobs_to_proto(logprobs),
            finish_reason=finish_reason_to_proto(finish_reason),
            score=score,
        )
    return step


def _flat(responses: _ByHandle) -> Iterator[worker_pb2.ConnectResponse]:
    return (response for each in responses.values() for response in each)
