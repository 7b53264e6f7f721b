"""What a fake worker says to one router, in order."""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.types import Handle, TokenDelta
from tandem.v1 import worker_pb2
from worker.ports import TokenColumns, TokenExtra
from worker.serving.router_session import columns_to_proto


def step_of(handle: Handle, *deltas: TokenDelta) -> worker_pb2.StepOutputs:
    """New tokens of the request that `handle` names."""
    columns = TokenColumns()
    for delta in deltas:
        for number, token_id in enumerate(delta.token_ids):
            logprobs = delta.logprobs[number] if number < len(delta.logprobs) else None
            reason = delta.finish_reason if number == len(delta.token_ids) - 1 else None
            extra = TokenExtra(logprobs, reason, delta.score)
            columns.add(handle, delta.index, delta.offset + number, token_id, None if extra == TokenExtra() else extra)
    return columns_to_proto(columns)


class Stream:
    """One router's stream: what is said to it, in order."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[worker_pb2.ConnectResponse] = asyncio.Queue()

    def say(self, **message: Any) -> None:
        self.messages.put_nowait(worker_pb2.ConnectResponse(**message))

    def tokens(self, handle: Handle, *deltas: TokenDelta) -> None:
        self.say(step_outputs=step_of(handle, *deltas))
