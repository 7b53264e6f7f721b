"""Cancel and deadline in every stage: both workers let go, the router forgets the request."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc
import pytest

from tandem.errors import DeadlineExceeded
from tandem.foreign import vllm_engine_pb2 as vllm
from tandem.foreign.vllm_engine_pb2_grpc import VllmEngineStub
from tests.integration.router.conftest import FakeCluster

PROMPT = (72, 105)
STAGES = ("reserve", "prefill", "first", "attach", "handoff_word", "decode")


def generate_by_vllm(cluster: Any, *prompt: int) -> Any:
    sampling = vllm.SamplingParams(max_tokens=8, temperature=0.0)
    request = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=prompt), sampling_params=sampling)
    return VllmEngineStub(cluster.channel).Generate(request)


async def reach(cluster: Any, stage: str, generate: Any = FakeCluster.generate, **options: Any) -> tuple[Any, Any, Any]:
    """A generation that stands still in `stage`, and its two workers."""
    prefill, decode = await cluster.add_pair()
    for worker in (prefill, decode):
        worker.hold(stage, "decode")
    call = generate(cluster, *PROMPT, **options)
    if stage == "decode":
        await cluster.until(lambda: set(decode.offsets) == {1})  # the first tokens came from the prefill worker
    else:
        reached = prefill if stage == "prefill" else decode
        await cluster.until(lambda: not reached.idle)
    return call, prefill, decode


def only_end(cluster: Any) -> Any:
    """How the one request ended, as the router's listeners hear it."""
    (request,) = cluster.recorded.requests
    return request.end


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "generate",
    [FakeCluster.generate, partial(FakeCluster.generate, n=16), generate_by_vllm],
    ids=["one choice", "16 choices", "VllmEngine"],
)
async def test_a_cancelled_request_frees_both_workers(cluster: Any, stage: str, generate: Any) -> None:
    call, prefill, decode = await reach(cluster, stage, generate)
    call.cancel()
    await cluster.until(lambda: cluster.idle and decode.num_releases == prefill.num_releases == 1)
    assert (only_end(cluster).finish_reasons, only_end(cluster).error) == ((), None)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_request_whose_deadline_passes_frees_both_workers(cluster: Any, stage: str) -> None:
    call, prefill, _ = await reach(cluster, stage, timeout_s=4.0)
    _, code, _ = await cluster.error_of(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await cluster.until(lambda: cluster.idle)
    assert isinstance(only_end(cluster).error, DeadlineExceeded)
    assert prefill.specs[0].timeout_s < 4.1  # gRPC rounds it up on the wire


async def test_the_routers_own_deadline_says_where_the_request_stood(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(total_s=4.0))
    call, _, _ = await reach(cluster, "decode", timeout_s=None)
    error, code, tokens = await cluster.error_of(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert isinstance(error, DeadlineExceeded)
    assert "while decoding, after 1 tokens" in error.message
    assert tokens == cluster.completion(PROMPT, 1)


async def test_a_deadline_beyond_the_routers_own_is_the_routers_own(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(total_s=60.0))
    _, decode = await cluster.add_pair()
    for timeout_s in (8 * 86400.0, None):
        await cluster.read_tokens(cluster.generate(*PROMPT, timeout_s=timeout_s))
    assert all(0 < spec.timeout_s <= 60.0 for spec in decode.specs)


async def test_a_client_that_leaves_while_waiting_for_admission_holds_no_place(launch: Any) -> None:
    cluster = await launch(max_active_requests=1)
    first, prefill, decode = await reach(cluster, "decode")
    second = cluster.generate(1, 2)
    await cluster.until(lambda: cluster.router.queue.num_queued == 1)
    second.cancel()
    await cluster.until(lambda: cluster.router.queue.num_queued == 0)
    for worker in (prefill, decode):
        worker.let_go()
    assert await cluster.read_tokens(first) == cluster.completion(PROMPT, 8)
    assert await cluster.read_tokens(cluster.generate(3)) == cluster.completion((3,), 8)


async def test_a_client_that_leaves_while_the_router_writes_frees_both_workers(cluster: Any) -> None:
    await cluster.add_pair()
    call = cluster.generate(*PROMPT, max_tokens=200)
    await call.read()
    call.cancel()
    await cluster.until(lambda: cluster.idle)


async def test_a_thousand_cancels_leave_nothing_behind(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    for _ in range(20):
        calls = [cluster.generate(number) for number in range(50)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
    await cluster.until(lambda: cluster.idle)
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    await cluster.until(lambda: decode.idle)
