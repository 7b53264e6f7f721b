"""`tandem serve` keeps its cluster whole: what ends or stands still is replaced, and holds up no stop."""

from __future__ import annotations

import os
import signal

import pytest

from bench.cluster import eventually, pid_of, serve
from bench.processes import children, standbys
from tandem.client import Client
from tandem.errors import TandemError
from tandem.types import Role

REPLACED_WITHIN_S = 60.0


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
def test_a_worker_that_was_stopped_from_outside_or_is_frozen_is_replaced(role: Role, signum: signal.Signals) -> None:
    with serve("demo") as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        before = pids(client)
        os.kill(before[role], signum)
        assert eventually(lambda: pids(client).get(role, before[role]) != before[role], REPLACED_WITHIN_S)
        assert client.complete("Once", max_tokens=2, timeout_s=30).choices[0].token_ids


def test_a_router_that_was_stopped_from_outside_is_replaced_at_its_address() -> None:
    with serve("demo") as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        pid = next(pid for pid in children_of(cluster.process.pid) if pid not in pids(client).values())
        os.kill(pid, signal.SIGTERM)
        assert eventually(
            lambda: sum("child ready child=router" in line for line in cluster.log) == 2, REPLACED_WITHIN_S
        )
        client.wait_ready(timeout_s=30)
        assert client.complete("Once", max_tokens=2, timeout_s=30).choices[0].token_ids
        assert cluster.process.poll() is None


def test_a_standby_takes_the_place_of_a_worker_that_ends() -> None:
    with serve("demo") as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        before = pids(client)
        assert eventually(lambda: standbys(cluster.process.pid), REPLACED_WITHIN_S)
        (standby,) = standbys(cluster.process.pid)
        os.kill(before[Role.DECODE], signal.SIGKILL)
        assert eventually(lambda: pids(client).get(Role.DECODE) == standby, REPLACED_WITHIN_S)
        assert children(cluster.process.pid)["decode-0"] == standby
        assert client.complete("Once", max_tokens=2, timeout_s=30).choices[0].token_ids


def children_of(pid: int) -> list[int]:
    """Process ids."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


def test_a_frozen_worker_does_not_hold_up_the_stop() -> None:
    """The grace would be five minutes: it is for work that goes on."""
    with serve("demo", "--drain-grace-seconds", "300") as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        os.kill(pid_of(client, Role.DECODE), signal.SIGSTOP)
        assert cluster.stop() == 0
