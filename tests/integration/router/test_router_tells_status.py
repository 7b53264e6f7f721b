"""What a router tells of its cluster: GetStatus and the admin port say the same."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

import tandem
from tandem.cluster_status import ClusterStatus
from tandem.convert import status_from_proto
from tandem.types import Role
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

TIMEOUT_S = 20.0


async def status_of(cluster: Any) -> ClusterStatus:
    stub = cluster_pb2_grpc.ClusterServiceStub(cluster.channel)
    return status_from_proto(await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=TIMEOUT_S))


async def fetch(address: str, path: str) -> Any:
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"http://{address}{path}") as response:
        return json.loads(await response.text())


async def test_a_router_tells_its_version_its_age_and_its_admin_port(cluster: Any) -> None:
    first, second = await status_of(cluster), await status_of(cluster)
    assert first.version == tandem.__version__
    assert 0 < first.uptime_s < second.uptime_s
    assert first.admin_address.startswith("127.0.0.1:")


async def test_requests_and_tokens_are_counted_with_their_latencies(cluster: Any) -> None:
    await cluster.add_pair()
    for prompt in ((1, 2, 3), (4, 5, 6)):
        assert len(await cluster.read_tokens(cluster.generate(*prompt, max_tokens=8, ignore_eos=True))) == 8

    recent = (await status_of(cluster)).recent

    assert (recent.total_requests, recent.total_tokens) == (2, 16)
    assert {each.name: each.count for each in recent.latencies} == {
        "time_to_first_token": 2,
        "inter_token": 14,
        "end_to_end": 2,
    }
    assert all(0 < each.p50_s <= each.p90_s <= each.p99_s for each in recent.latencies)
    assert recent.requests_per_s > 0


async def test_the_admin_port_says_what_get_status_says(cluster: Any) -> None:
    await cluster.add_pair()
    status = await status_of(cluster)

    told = await fetch(status.admin_address, "/status.json")

    assert told["process"] == "router"
    assert [each["info"]["worker_id"] for each in told["cluster"]["workers"]] == ["d0", "p0"]
    assert told["cluster"]["ready"] is status.ready is True
    assert told["cluster"]["admin_address"] == status.admin_address


async def test_prometheus_is_told_of_every_admin_port_there_is(cluster: Any) -> None:
    await cluster.add(Role.PREFILL, "p0", admin_address="127.0.0.1:1")
    await cluster.add(Role.DECODE, "d0", admin_address="127.0.0.1:2")
    await cluster.add(Role.DECODE, "d1")
    address = (await status_of(cluster)).admin_address

    assert await fetch(address, "/targets") == [
        {"targets": [address], "labels": {"role": "router"}},
        {"targets": ["127.0.0.1:1"], "labels": {"role": "prefill", "worker_id": "p0"}},
        {"targets": ["127.0.0.1:2"], "labels": {"role": "decode", "worker_id": "d0"}},
    ]


async def test_without_an_admin_port_none_is_told(launch: Any) -> None:
    cluster = await launch(admin_listen=None)
    assert (await status_of(cluster)).admin_address == ""


async def test_as_many_requests_may_run_as_the_seats_of_the_workers_that_serve_ask_for(cluster: Any) -> None:
    status = cluster.router.status
    assert status.max_active_requests == 256
    await cluster.add(Role.ELASTIC, "e0", max_seqs=256)
    await cluster.add(Role.ELASTIC, "odd", max_seqs=64, layout_fingerprint="another")
    await cluster.until(lambda: status.max_active_requests == 512)
