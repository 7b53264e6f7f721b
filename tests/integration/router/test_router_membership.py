"""Workers come, fall silent, start anew, drain and leave; health and status tell the truth at once."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.received_error import error_from_rpc
from tandem.types import Role, new_incarnation
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

PROMPT = (72, 105)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status(cluster: Any) -> cluster_pb2.GetStatusResponse:
    stub = cluster_pb2_grpc.ClusterServiceStub(cluster.channel)
    return await stub.GetStatus(cluster_pb2.GetStatusRequest())


async def test_health_is_told_when_the_last_pair_comes_and_goes(cluster: Any) -> None:
    watch = health_pb2_grpc.HealthStub(cluster.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == NOT_SERVING
    _, decode = await cluster.add_pair()
    assert (await watch.read()).status == SERVING
    await decode.die()
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_half_a_pair_is_not_serving_and_the_status_says_why(cluster: Any) -> None:
    await cluster.add(Role.PREFILL, "p")
    answer = await status(cluster)
    assert not answer.ready
    assert (
        answer.not_ready_reason
        == "no decode worker can take it: none is registered; start one with --router and the address of this router"
    )
    (worker,) = answer.workers
    assert (worker.info.worker_id, worker.connected, worker.load.pool.total_blocks) == ("p", True, 64)


async def test_a_silent_worker_is_forgotten_after_its_lease_and_comes_back(launch: Any) -> None:
    cluster = await launch(lease_s=1.0)
    _, decode = await cluster.add_pair()
    await decode.fall_silent()
    silent = cluster.register(decode.info)
    await silent.read()
    await cluster.until(lambda: len(cluster.router.workers.views()) == 1)
    decode.announce(cluster.address)
    await cluster.until(lambda: cluster.router.workers.readiness() is None)
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    silent.cancel()


async def test_a_new_life_replaces_the_old_at_once_and_the_old_cannot_return_beside_it(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    old = decode.info
    new = dataclasses.replace(old, incarnation=new_incarnation())
    call = cluster.register(new)
    await call.read()
    assert [view.info for view in cluster.router.workers.views() if view.info.role is Role.DECODE] == [new]
    back = cluster.register(old)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await back.read()
    assert "newer incarnation" in error_from_rpc(caught.value).message
    call.cancel()


async def test_a_worker_whose_name_another_process_used_for_once_is_back_by_itself(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    other = cluster.register(dataclasses.replace(decode.info, incarnation=new_incarnation(), address="127.0.0.1:1"))
    await other.read()
    await cluster.until(lambda: all(view.info != decode.info for view in cluster.router.workers.views()))
    other.cancel()
    await cluster.until(lambda: cluster.router.workers.readiness() is None)
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)


async def test_a_drained_worker_is_told_and_gets_no_new_work(cluster: Any) -> None:
    _, first = await cluster.add_pair()
    first.pause_at(3)
    running = cluster.generate(*PROMPT)
    await cluster.until(lambda: first.offsets == [3])
    second = await cluster.add(Role.DECODE, "d1")
    await cluster_pb2_grpc.ClusterServiceStub(cluster.channel).Drain(cluster_pb2.DrainRequest(worker_id="d0"))
    await cluster.until(lambda: first.num_drain_orders == 1)
    for number in range(6):
        assert await cluster.read_tokens(cluster.generate(number)) == cluster.completion((number,), 8)
    assert (len(first.specs), len(second.specs)) == (1, 6)
    first.let_go()
    assert await cluster.read_tokens(running) == cluster.completion(PROMPT, 8)


async def test_an_engine_that_stands_still_with_work_is_not_used_and_its_requests_move(launch: Any) -> None:
    cluster = await launch(stall_s=0.5, lease_s=2.0)
    _, stuck = await cluster.add_pair()
    stuck.pause_at(3)
    call = cluster.generate(*PROMPT)
    await cluster.until(lambda: stuck.offsets == [3])
    stuck.load = dataclasses.replace(stuck.load, running_seqs=1, engine_steps=7)
    other = await cluster.add(Role.DECODE, "d1")
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, 8)
    assert len(other.specs) == 1
    await cluster.until(lambda: stuck.idle)
    stuck.load = dataclasses.replace(stuck.load, engine_steps=8)
    await cluster.until(lambda: all(view.obstacle is None for view in cluster.router.workers.views()))


async def test_a_draining_router_finishes_what_runs_and_refuses_the_rest(launch: Any) -> None:
    cluster = await launch(drain_grace_s=60.0)
    _, decode = await cluster.add_pair()
    decode.pause_at(3)
    running = cluster.generate(*PROMPT)
    await cluster.until(lambda: decode.offsets == [3])
    watch = health_pb2_grpc.HealthStub(cluster.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    cluster.stop.set()
    assert (await watch.read()).status == NOT_SERVING
    await cluster.until(lambda: cluster.router.entrance.draining)
    # A call that crosses the GOAWAY may end CANCELLED, so this one waits for it.
    await cluster.until(lambda: cluster.channel.get_state() is not grpc.ChannelConnectivity.READY)
    _, code, _ = await cluster.error_of(cluster.generate(1))
    assert code is grpc.StatusCode.UNAVAILABLE
    decode.let_go()
    assert await cluster.read_tokens(running) == cluster.completion(PROMPT, 8)
    async with asyncio.timeout(20):
        await cluster.serving
