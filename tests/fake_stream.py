"""What a fake worker says to one router, in order."""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.convert import finish_reason_to_proto, logprobs_to_proto
from tandem.types import Handle, TokenDelta
from tandem.v1 import worker_pb2


def delta_to_proto(handle: Handle, delta: TokenDelta) -> worker_pb2.SequenceOutput:
    """New tokens of the sequence that `handle` names."""
    return worker_pb2.SequenceOutput(
        handle=handle,
        offset=delta.offset,
        token_ids=delta.token_ids,
        logprobs=[logprobs_to_proto(each) for each in delta.logprobs],
        finish_reason=finish_reason_to_proto(delta.finish_reason),
        index=delta.index,
    )


class Stream:
    """One router's stream: what is said to it, in order."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[worker_pb2.ConnectResponse] = asyncio.Queue()

    def say(self, **message: Any) -> None:
        self.messages.put_nowait(worker_pb2.ConnectResponse(**message))

    def tokens(self, handle: Handle, *deltas: TokenDelta) -> None:
        self.say(step_outputs=worker_pb2.StepOutputs(outputs=[delta_to_proto(handle, each) for each in deltas]))
