"""What a worker has yet to tell one router: merged while the stream is busy, never awaited.

Order is kept within a sequence: answers (reserved, prefill_done, handoff_done), then tokens,
then failed. Memory is bounded by what the sequences themselves may generate: a slow router's
tokens are merged into one delta per sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

from tandem.convert import delta_to_proto
from tandem.types import FinishReason, Handle, TokenDelta, TokenId, TokenLogprobs
from tandem.v1 import worker_pb2

MAX_TOKENS_PER_MESSAGE = 16384
_TOKENS_PER_LOGPROB = 4
"""What one reported alternative weighs against a bare token, in encoded bytes."""


class Outbox:
    """Filled by the worker's loop, emptied by one writer task."""

    def __init__(self) -> None:
        self._pending: dict[Handle, _Pending] = {}
        self._filled = asyncio.Event()

    def add_answer(self, handle: Handle, answer: worker_pb2.ConnectResponse) -> None:
        """Something to be told before this sequence's tokens."""
        self._of(handle).answers.append(answer)

    def add_delta(self, handle: Handle, delta: TokenDelta) -> None:
        """Tokens that follow those already added."""
        self._of(handle).tokens.append(delta)

    def add_failed(self, handle: Handle, failed: worker_pb2.Failed) -> None:
        """The sequence's last word."""
        self._of(handle).failed = failed

    def discard(self, handle: Handle) -> None:
        """The router wants nothing more of it."""
        self._pending.pop(handle, None)

    async def wait(self) -> None:
        """Returns when there is something to take."""
        await self._filled.wait()

    def take(self) -> list[worker_pb2.ConnectResponse]:
        """Everything, in the order to be written."""
        pending, self._pending = self._pending, {}
        self._filled.clear()
        responses = [answer for each in pending.values() for answer in each.answers]
        responses += _step_outputs(pending)
        responses += [
            worker_pb2.ConnectResponse(failed=each.failed) for each in pending.values() if each.failed is not None
        ]
        return responses

    def _of(self, handle: Handle) -> _Pending:
        self._filled.set()
        return self._pending.setdefault(handle, _Pending())


class _Pending:
    """What waits of one sequence."""

    __slots__ = ("answers", "failed", "tokens")

    def __init__(self) -> None:
        self.answers: list[worker_pb2.ConnectResponse] = []
        self.tokens = _MergedDelta()
        self.failed: worker_pb2.Failed | None = None


class _MergedDelta:
    """Consecutive deltas of one sequence as one."""

    __slots__ = ("_finish_reason", "_logprobs", "_offset", "_token_ids")

    def __init__(self) -> None:
        self._offset = 0
        self._token_ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None

    def append(self, delta: TokenDelta) -> None:
        """INVARIANT: deltas of a sequence join without gap (checked by the router, test_outbox)."""
        if not self._token_ids:
            self._offset = delta.offset
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._finish_reason = delta.finish_reason

    def pieces(self) -> Iterator[tuple[int, TokenDelta]]:
        """The whole in messages of bearable size, each with its weight in tokens."""
        if not self._token_ids and self._finish_reason is None:
            return
        weight = 1 + _TOKENS_PER_LOGPROB * (1 + len(self._logprobs[0].top)) if self._logprobs else 1
        step = max(1, MAX_TOKENS_PER_MESSAGE // weight)
        for start in range(0, max(1, len(self._token_ids)), step):
            token_ids = tuple(islice(self._token_ids, start, start + step))
            last = start + step >= len(self._token_ids)
            yield (
                len(token_ids) * weight,
                TokenDelta(
                    offset=self._offset + start,
                    token_ids=token_ids,
                    logprobs=tuple(islice(self._logprobs, start, start + step)),
                    finish_reason=self._finish_reason if last else None,
                ),
            )


def _step_outputs(pending: dict[Handle, _Pending]) -> Iterator[worker_pb2.ConnectResponse]:
    outputs: list[worker_pb2.SequenceOutput] = []
    weight = 0
    for handle, each in pending.items():
        for number, (piece_weight, delta) in enumerate(each.tokens.pieces()):
            if outputs and (number > 0 or weight + piece_weight > MAX_TOKENS_PER_MESSAGE):
                yield worker_pb2.ConnectResponse(step_outputs=worker_pb2.StepOutputs(outputs=outputs))
                outputs, weight = [], 0
            outputs.append(delta_to_proto(handle, delta))
            weight += piece_weight
    if outputs:
        yield worker_pb2.ConnectResponse(step_outputs=worker_pb2.StepOutputs(outputs=outputs))
