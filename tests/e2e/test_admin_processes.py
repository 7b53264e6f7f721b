"""The admin ports of real processes: each is known to the router; and channelz on the gRPC port."""

from __future__ import annotations

import json
import urllib.request

import grpc
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from bench.support.cluster import Cluster
from tandem.client import Client

TIMEOUT_S = 10.0


def fetch(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=TIMEOUT_S) as response:
        return str(response.read().decode())


def admin_addresses(client: Client) -> dict[str, str]:
    """By process."""
    status = client.status()
    return {"router": status.admin_address} | {
        worker.info.worker_id: worker.info.admin_address for worker in status.workers
    }


def test_every_process_has_a_port_of_its_own_that_prometheus_is_told_of(client: Client) -> None:
    addresses = admin_addresses(client)
    targets = json.loads(fetch(addresses["router"], "/targets"))
    assert len(set(addresses.values())) == 3
    assert {each["targets"][0] for each in targets} == set(addresses.values())
    for process, address in addresses.items():
        told = json.loads(fetch(address, "/status.json"))
        assert told["process"] == process.partition("-")[0]
        assert f'role="{told["process"]}"' in fetch(address, "/metrics")
        assert fetch(address, "/readyz") == "ok\n"


def test_channelz_of_the_router_shows_its_channels_to_the_workers(demo_cluster: Cluster, client: Client) -> None:
    workers = {worker.info.address for worker in client.status().workers}
    with grpc.insecure_channel(demo_cluster.target) as channel:
        told = channelz_pb2_grpc.ChannelzStub(channel).GetTopChannels(
            channelz_pb2.GetTopChannelsRequest(), timeout=TIMEOUT_S
        )
    targets = " ".join(each.data.target for each in told.channel)
    assert all(address in targets for address in workers)
