"""Several routers on one port: each serves, and one that is lost is replaced while the others go on."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.support.cluster import Cluster, eventually, serve
from bench.support.processes import children
from tandem.client import Client
from tandem.errors import TandemError

pytestmark = pytest.mark.usefixtures("real_commands")

REPLACED_WITHIN_S = 60.0


def own_addresses(cluster: Cluster) -> dict[str, int]:
    """Process id of each router by its own address."""
    known = children(cluster.process.pid)
    return {f"127.0.0.1:{name.removeprefix('router-')}": pid for name, pid in known.items() if "router" in name}


def num_workers(target: str) -> int:
    """Registered there; 0 while nobody answers."""
    try:
        with Client(target) as client:
            status = client.status(timeout_s=5)
    except TandemError:
        return 0
    return len(status.workers) if status.ready else 0


def test_requests_go_through_every_router_and_one_that_is_killed_is_replaced() -> None:
    with serve("demo", "--prefill", "1", "--decode", "2", "--router-processes", "2") as cluster:
        routers = own_addresses(cluster)
        first, second = routers
        assert eventually(lambda: [num_workers(each) for each in (first, second)] == [3, 3], REPLACED_WITHIN_S)
        answers = []
        for target in (cluster.target, first, second):
            with Client(target) as client:
                answers.append(client.complete("Once upon", max_tokens=8, temperature=0.0, timeout_s=30).text)
        assert len(set(answers)) == 1

        with Client(second) as client, ThreadPoolExecutor(1) as pool:
            streaming = pool.submit(lambda: len(list(client.generate("Once upon", max_tokens=400, ignore_eos=True))))
            os.kill(routers[first], signal.SIGKILL)
            assert streaming.result(60) > 0
        with Client(cluster.target) as client:  # the kernel sends callers to who is left
            assert client.complete("Once upon", max_tokens=8, temperature=0.0, timeout_s=30).text == answers[0]

        assert eventually(lambda: num_workers(first) == 3, REPLACED_WITHIN_S)
        assert cluster.stop() == 0
