"""Workers of two ranks each, two that prefill and two that decode, under load: a lost rank costs its worker alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.support.cluster import becomes_idle, eventually, serve
from bench.support.fleet import Fleet
from bench.support.ports import free_ports
from shell.telemetry import metric_names as names
from tandem.client import Client
from tandem.types import Role
from tests.scraped import fetch, total

NUM_CALLERS, OUTPUT_TOKENS = 6, 400

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def ranked() -> Iterator[Client]:
    options = ("--prefill", "2", "--decode", "2", "--device", "cpu", "--dtype", "float32", "--tensor-parallel", "2")
    with serve("demo", *options, "--patience-seconds", "60") as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=60)
        yield client


def workers_of(client: Client, role: Role) -> dict[str, int]:
    """Process ids by incarnation."""
    return {each.info.incarnation: each.info.pid for each in client.status().workers if each.info.role == role}


def decodes(client: Client, name: str) -> bool:
    return any(each.info.worker_id == name and each.load.running_seqs for each in client.status().workers)


def counted(client: Client, name: str, **labels: str) -> float:
    return total(fetch(f"http://{client.status().admin_address}/metrics").decode(), name, **labels)


def busiest(client: Client, role: Role) -> str | None:
    """The incarnation of a worker of this role once any worker decodes; one that decodes, if it is of this role."""
    workers = sorted(client.status().workers, key=lambda each: -each.load.running_seqs)
    if not workers[0].load.running_seqs:
        return None
    return next(each.info.incarnation for each in workers if each.info.role == role)


def followers_of(pid: int) -> list[int]:
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    pids = [int(child) for each in children for child in each]
    return [each for each in pids if b"engine.rank" in Path(f"/proc/{each}/cmdline").read_bytes()]


def answers(client: Client) -> list[tuple[int, ...]]:
    def call(caller: int) -> tuple[int, ...]:
        prompt = [5 + caller, *range(20, 60)]
        done = client.complete(token_ids=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        return tuple(done.choices[0].token_ids)

    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        return list(callers.map(call, range(NUM_CALLERS)))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("role", "rank"), [(Role.PREFILL, 1), (Role.DECODE, 0), (Role.DECODE, 1)])
@pytest.mark.timeout(300)
def test_a_lost_rank_costs_no_request(ranked: Client, signum: signal.Signals, role: Role, rank: int) -> None:
    expected = answers(ranked)
    assert eventually(lambda: len(workers_of(ranked, role)) == 2, 90)
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(answers, ranked)
        assert eventually(lambda: busiest(ranked, role) is not None)
        incarnation = busiest(ranked, role)
        assert incarnation is not None
        pid = workers_of(ranked, role)[incarnation]
        (follower,) = followers_of(pid)
        os.kill((pid, follower)[rank], signum)
        assert asked.result(timeout=120) == expected
    assert eventually(
        lambda: incarnation not in workers_of(ranked, role) and len(workers_of(ranked, role)) == 2, 90
    )  # an idle worker too
    assert not Path(f"/proc/{follower}").exists()
    assert becomes_idle(ranked)


@pytest.mark.timeout(300)
def test_streams_move_between_workers_of_unequal_sizes_and_a_roll_out_to_more_ranks_fails_no_request() -> None:
    with Fleet(free_ports(1), options=("--device", "cpu", "--dtype", "float32")) as fleet:
        fleet.start_router(0)
        fleet.start_worker(Role.PREFILL, "prefill", "--tensor-parallel", "1")
        fleet.start_worker(Role.DECODE, "decode-1", "--tensor-parallel", "1")
        with Client(fleet.target) as client, ThreadPoolExecutor(1) as asking:
            expected = answers(client)
            for size in (2, 4):
                fleet.start_worker(Role.DECODE, f"decode-{size}", "--tensor-parallel", str(size))
                asked = asking.submit(answers, client)
                old = f"decode-{size // 2}"
                assert eventually(lambda old=old: decodes(client, old))
                assert fleet.stop(old).code == 0
                assert asked.result(timeout=120) == expected
            assert answers(client) == expected
            assert counted(client, names.PLACEMENTS.name, path="handed_over") > 0
            assert counted(client, names.FAILED_TRIES.name) == 0, "a request was replayed"
            assert not any(each.set_apart for each in client.status().workers)
