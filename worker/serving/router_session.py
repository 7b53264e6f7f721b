"""One router's stream as a worker sees it: a `RouterPort` that writes what it is told into messages at once.

    reserved · prefill_started · prefill_done ─▶ answers ┐
    prompt_logprobs · leaving                 ─▶ answers │
    token                                     ─▶ outputs ├─ take ─▶ the stream's writer, in this order
    handoff_done · failed                     ─▶ ends    │
    waiting                                   ─▶ waits   │
    what the cache holds                      ─▶ news    ┘

A token goes straight into the pending StepOutputs: as a row of its columns where there is nothing else to tell, and the
router takes them. While the writer waits for a slow router, the tokens of a choice merge into one SequenceOutput; a
message that has reached its size is closed, and the next one begun.
Never awaits: memory is bounded by what the requests themselves may generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from engine.step import SampledToken
from tandem.convert import failed_to_proto, finish_reason_to_proto, logprobs_to_proto, wait_reason_to_proto
from tandem.errors import TandemError
from tandem.types import FinishReason, Handle, Incarnation, TokenId, TokenLogprobs, WaitReason
from tandem.v1 import worker_pb2
from worker.ports import TokenColumns
from worker.serving.cache_reports import CacheNews

MAX_TOKENS_PER_MESSAGE = 16384
_TOKENS_PER_LOGPROB = 4
"""What one reported alternative weighs against a bare token, in encoded bytes."""

_ByHandle: TypeAlias = dict[Handle, list[worker_pb2.ConnectResponse]]


class RouterSession:
    """Handed to the worker's core with every request of this router, and emptied by one writer task."""

    def __init__(self, router_incarnation: Incarnation, *, takes_columns: bool = False) -> None:
        """`takes_columns`: whether the router reads the columns of StepOutputs."""
        self.router_incarnation = router_incarnation
        self._takes_columns = takes_columns
        self._open: set[Handle] = set()
        self._answers: _ByHandle = {}
        self._outputs = _PendingOutputs(takes_columns)
        self._ends: _ByHandle = {}
        self._waits: dict[WaitReason, worker_pb2.ConnectResponse] = {}
        self._filled = asyncio.Event()
        self.cache_news = CacheNews(self._take_cache_news)
        """What this router has not been told of the cache yet."""
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
        if handle in self._open:
            self._outputs.add(handle, index, offset, token, finish_reason, score)
            self._filled.set()

    def tokens(self, columns: TokenColumns) -> None:
        """See `worker.ports.RouterPort`."""
        if self._open.issuperset(columns.handles) and self._outputs.add_columns(columns):
            self._filled.set()
            return
        for handle, index, offset, token_id in columns.rows():
            self.token(handle, index, offset, SampledToken(token_id, None), None)

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None:
        """See `worker.ports.RouterPort`."""
        message = worker_pb2.HandoffDone(handle=handle, transfer_bytes=num_bytes, transfer_seconds=seconds)
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
        self._outputs.discard(handle)
        self._ends.pop(handle, None)

    async def wait(self) -> None:
        """Returns when there may be something to take."""
        await self._filled.wait()

    def take(self) -> list[worker_pb2.ConnectResponse]:
        """Everything, in the order to be written; of what the cache holds, a part."""
        answers, self._answers = self._answers, {}
        outputs, self._outputs = self._outputs, _PendingOutputs(self._takes_columns)
        ends, self._ends = self._ends, {}
        waits, self._waits = self._waits, {}
        self._filled.clear()
        return [*_flat(answers), *outputs.messages(), *_flat(ends), *waits.values(), *self._cache_changes()]

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


class _PendingMessage:
    """One StepOutputs message while it fills. A choice's first bare token is a row, all others merge in an output.

    Rows come one by one, or all of a step at once: those are kept as they are, and then no others are added.
    """

    __slots__ = ("_columns", "_merging", "_outputs", "_response", "_rows", "_takes_columns", "weight")

    def __init__(self, takes_columns: bool) -> None:
        self._takes_columns = takes_columns
        self._response = worker_pb2.ConnectResponse()
        self._outputs = self._response.step_outputs.outputs
        self._merging: dict[tuple[Handle, int], worker_pb2.SequenceOutput] = {}
        self._rows: dict[tuple[Handle, int], tuple[int, TokenId]] = {}
        """Offset and token by choice."""
        self._columns: TokenColumns | None = None
        self.weight = 0

    def add(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None,
    ) -> None:
        """INVARIANT: a choice's tokens come without a gap (checked by the router, test_router_session)."""
        self.weight += 1
        key = handle, index
        output = self._merging.get(key)
        if output is None:
            is_bare = token.logprobs is None and finish_reason is None and score is None
            if is_bare and self._takes_columns and self._columns is None and key not in self._rows:
                self._rows[key] = offset, token.token_id
                return
            output = self._outputs.add(handle=handle, index=index, offset=offset, token_ids=(token.token_id,))
            self._merging[key] = output
        else:
            output.token_ids.append(token.token_id)
        if token.logprobs is not None:
            output.logprobs.append(logprobs_to_proto(token.logprobs))
            self.weight += _TOKENS_PER_LOGPROB * (1 + len(token.logprobs.top))
        if finish_reason is not None:
            output.finish_reason = finish_reason_to_proto(finish_reason)
        if score is not None:
            output.score = score

    def add_columns(self, columns: TokenColumns) -> bool:
        """Takes over a step's rows; False if it cannot, since rows or tokens of these choices are here."""
        if not self._takes_columns or self._rows or self._columns is not None:
            return False
        if self._merging and not {handle for handle, _ in self._merging}.isdisjoint(columns.handles):
            return False
        self._columns = columns
        self.weight += len(columns.handles)
        return True

    def discard(self, handle: Handle) -> None:
        """Drops what waits of one request."""
        if self._columns is not None and handle in self._columns.handles:
            columns, self._columns = self._columns, TokenColumns()
            for row in columns.rows():
                if row[0] != handle:
                    self._columns.add(*row)
        for key in [key for key in self._rows if key[0] == handle]:
            del self._rows[key]
        for key in [key for key in self._merging if key[0] == handle]:
            del self._merging[key]
            self._outputs.remove(next(each for each in self._outputs if (each.handle, each.index) == key))

    def taken(self) -> worker_pb2.ConnectResponse | None:
        """The message; None if it holds nothing."""
        columns = self._columns or TokenColumns()
        for (handle, index), (offset, token_id) in self._rows.items():
            columns.add(handle, index, offset, token_id)
        if columns.handles:
            step = self._response.step_outputs
            step.handles.extend(columns.handles)
            step.offsets.extend(columns.offsets)
            step.token_ids.extend(columns.token_ids)
            if any(columns.indexes):
                step.indexes.extend(columns.indexes)
        return self._response if columns.handles or self._outputs else None


class _PendingOutputs:
    """StepOutputs messages that have not been taken; tokens merge within the last one."""

    __slots__ = ("_closed", "_current", "_takes_columns")

    def __init__(self, takes_columns: bool) -> None:
        self._takes_columns = takes_columns
        self._closed: list[_PendingMessage] = []
        self._current = _PendingMessage(takes_columns)

    def add(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None,
    ) -> None:
        """Into the last message, or into a new one if that is full."""
        if self._current.weight >= MAX_TOKENS_PER_MESSAGE:
            self._closed.append(self._current)
            self._current = _PendingMessage(self._takes_columns)
        self._current.add(handle, index, offset, token, finish_reason, score)

    def add_columns(self, columns: TokenColumns) -> bool:
        """Into the last message; False if they do not fit there, or cannot be kept as columns."""
        if self._current.weight + len(columns.handles) > MAX_TOKENS_PER_MESSAGE:
            return False
        return self._current.add_columns(columns)

    def discard(self, handle: Handle) -> None:
        """Drops what waits of one request."""
        for message in (*self._closed, self._current):
            message.discard(handle)

    def messages(self) -> Iterator[worker_pb2.ConnectResponse]:
        """All that hold anything, oldest first."""
        return (taken for each in (*self._closed, self._current) if (taken := each.taken()) is not None)


def _flat(responses: _ByHandle) -> Iterator[worker_pb2.ConnectResponse]:
    return (response for each in responses.values() for response in each)
