"""`tandem serve` keeps its cluster whole: what ends or stands still is replaced, and holds up no stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from bench.support.cluster import Cluster, eventually, pid_of, serve
from bench.support.processes import children
from tandem.client import Client
from tandem.errors import TandemError
from tandem.types import Role
from tests.forked_commands import Forking

pytestmark = pytest.mark.usefixtures("real_commands")

REPLACED_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Whatever a test ends of it, it becomes whole again."""
    with serve("demo") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    """Of the cluster, which is whole."""
    with Client(cluster.target) as client:
        client.wait_ready(timeout_s=60)
        assert eventually(lambda: len(pids(client)) == 2, REPLACED_WITHIN_S)
        yield client


def pids(client: Client) -> dict[Role, int]:
    """Of the ready cluster's workers; empty while it is not whole."""
    try:
        status = client.status(timeout_s=5)
    except TandemError:
        return {}
    return {worker.info.role: worker.info.pid for worker in status.workers} if status.ready else {}


@pytest.mark.parametrize(
    ("role", "signum"), [(Role.PREFILL, signal.SIGTERM), (Role.DECODE, signal.SIGTERM), (Role.DECODE, signal.SIGSTOP)]
)
def test_a_worker_that_was_stopped_from_outside_or_is_frozen_is_replaced(
    client: Client, role: Role, signum: signal.Signals
) -> None:
    before = pids(client)
    os.kill(before[role], signum)
    assert eventually(lambda: pids(client).get(role, before[role]) != before[role], REPLACED_WITHIN_S)
    assert client.complete("Once", max_tokens=2, timeout_s=30).choices[0].token_ids


def test_a_router_that_was_stopped_from_outside_is_replaced_at_its_address(cluster: Cluster, client: Client) -> None:
    os.kill(children(cluster.process.pid)["router"], signal.SIGTERM)
    assert eventually(lambda: sum("child ready child=router" in line for line in cluster.log) == 2, REPLACED_WITHIN_S)
    client.wait_ready(timeout_s=30)
    assert client.complete("Once", max_tokens=2, timeout_s=30).choices[0].token_ids
    assert cluster.process.poll() is None


def test_a_frozen_worker_does_not_hold_up_the_stop(fork_command: Forking, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace would be five minutes: it is for work that goes on."""
    monkeypatch.setattr("bench.support.cluster.open_command", fork_command)  # how it started is no matter here
    with serve("demo", "--drain-grace-seconds", "300") as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        os.kill(pid_of(client, Role.DECODE), signal.SIGSTOP)
        assert cluster.stop() == 0
