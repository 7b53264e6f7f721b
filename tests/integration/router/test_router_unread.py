"""Callers that do not read their answers: what they hold is known, and ends."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from tandem.errors import Overloaded
from tandem.rpc.channel import open_channel
from tandem.rpc.received_error import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

PROMPT = (1, 2, 3)
NUM_TOKENS = 200
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]
"""The connection takes little that is not read."""


async def begin_unread(cluster: Any, stack: list[grpc.aio.Channel]) -> Any:
    """A generation of which its caller reads nothing."""
    channel = open_channel(cluster.address, more_options=list(SMALL_WINDOW))
    stack.append(channel)
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, logprobs=2, n=4)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
    stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    return stub.Generate(request, timeout=60)


async def unread_call(cluster: Any, stack: list[grpc.aio.Channel]) -> Any:
    """One that has ended on its worker."""
    call = await begin_unread(cluster, stack)
    await cluster.until(lambda: [each.ended_once_and_last for each in cluster.recorded.requests] == [True] * len(stack))
    return call


async def test_a_request_is_active_until_its_answer_has_left(launch: Any) -> None:
    cluster = await launch()
    await cluster.add_pair()
    channels: list[grpc.aio.Channel] = []

    call = await unread_call(cluster, channels)

    assert cluster.router.status.cluster().active_requests == 1
    tokens: dict[int, list[int]] = {}
    while isinstance(response := await call.read(), pb.GenerateResponse):
        tokens.setdefault(response.index, []).extend(response.token_ids)
    assert tokens == {index: cluster.completion(PROMPT, NUM_TOKENS, index) for index in range(4)}
    await cluster.until(lambda: cluster.router.status.cluster().active_requests == 0)
    await channels[0].close()


async def test_an_answer_that_stays_unread_is_ended_and_its_caller_told_why(launch: Any) -> None:
    cluster = await launch(max_unread_s=1.0)
    await cluster.add_pair()
    channels: list[grpc.aio.Channel] = []

    call = await unread_call(cluster, channels)
    await cluster.until(lambda: cluster.idle)

    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await cluster.read_tokens(call)
    error = error_from_rpc(ended.value)
    assert isinstance(error, Overloaded)
    assert "not read for 1 s" in error.message
    await channels[0].close()


async def test_one_that_ends_so_while_it_runs_has_failed(launch: Any) -> None:
    cluster = await launch(max_unread_s=1.0)
    _, decode = await cluster.add_pair()
    decode.pause_at(NUM_TOKENS - 10)
    channels: list[grpc.aio.Channel] = []

    call = await begin_unread(cluster, channels)
    await cluster.until(lambda: [each.ended_once_and_last for each in cluster.recorded.requests] == [True])

    (request,) = cluster.recorded.requests
    assert isinstance(request.end.error, Overloaded)
    assert "not read for 1 s" in request.end.error.message
    call.cancel()
    await channels[0].close()
