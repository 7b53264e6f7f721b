"""More calls at one moment than a router's event loop has taken up: each is answered, or told when to come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc.aio
import pytest

from tandem.errors import Overloaded, TandemError
from tandem.rpc.channel import open_channel
from tandem.rpc.received_error import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

NUM_CALLS = 2000
NUM_CHANNELS = 4
TIMEOUT_S = 120.0


class Burst:
    """Clients on connections of their own, that call at the same time."""

    def __init__(self, address: str) -> None:
        self.channels = [open_channel(address) for _ in range(NUM_CHANNELS)]
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self.channels]

    async def connect(self) -> None:
        for stub in self._stubs:
            await stub.GetModel(pb.GetModelRequest(), timeout=TIMEOUT_S)

    def complete(self, number: int) -> Any:
        """Begins call `number`."""
        sampling = pb.SamplingParams(max_tokens=2)
        generate = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=sampling)
        return self._stubs[number % NUM_CHANNELS].Complete(pb.CompleteRequest(generate=generate), timeout=TIMEOUT_S)

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()


async def outcome(call: Any) -> str:
    """OK; the class of an error with our details; the status of one without."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if "grpc-status-details-bin" not in dict(error.trailing_metadata() or ()):
            return f"{error.code().name} without details"
        known: TandemError = error_from_rpc(error)
        return f"{type(known).__name__} {known.retry_after_s > 0}" if isinstance(known, Overloaded) else repr(known)
    return "OK"


@pytest.fixture
async def burst(launch: Any) -> Any:
    cluster = await launch(max_active_requests=1, max_queued_requests=1)
    await cluster.add_pair()
    burst = Burst(cluster.address)
    await burst.connect()
    yield burst
    await burst.close()


async def test_every_call_of_a_burst_is_served_or_told_when_to_come_back(burst: Burst) -> None:
    calls = [burst.complete(number) for number in range(NUM_CALLS)]

    outcomes = Counter([await outcome(call) for call in calls])

    assert outcomes["OK"] + outcomes["Overloaded True"] == NUM_CALLS, outcomes
    assert outcomes["OK"] >= 1


async def test_calls_that_are_reset_on_other_connections_end_no_other_call(burst: Burst) -> None:
    hostile = [burst.complete(NUM_CHANNELS * number) for number in range(NUM_CALLS)]
    await asyncio.sleep(0)  # they are sent
    for call in hostile:
        call.cancel()

    innocent = [burst.complete(NUM_CHANNELS * number + 1) for number in range(200)]

    outcomes = Counter([await outcome(call) for call in innocent])
    assert outcomes["OK"] + outcomes["Overloaded True"] == len(innocent), outcomes
