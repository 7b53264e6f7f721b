"""Workers of two ranks each, under load: a rank that is lost costs its worker, and no request."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.support.cluster import becomes_idle, eventually, serve
from tandem.client import Client

NUM_CALLERS, OUTPUT_TOKENS = 6, 400

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def ranked() -> Iterator[Client]:
    options = ("--workers", "2", "--device", "cpu", "--dtype", "float32", "--tensor-parallel", "2")
    with serve("demo", *options, "--patience-seconds", "60") as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=60)
        yield client


def workers_of(client: Client) -> dict[str, int]:
    """Process ids by incarnation."""
    return {each.info.incarnation: each.info.pid for each in client.status().workers}


def running(client: Client) -> list[str]:
    """Incarnations of workers that compute: a rank that stands still is noticed in a step."""
    return [each.info.incarnation for each in client.status().workers if each.load.running_seqs]


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
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_costs_no_request(ranked: Client, signum: signal.Signals, rank: int) -> None:
    expected = answers(ranked)
    assert eventually(lambda: len(workers_of(ranked)) == 2, 90)
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(answers, ranked)
        assert eventually(lambda: bool(running(ranked)))
        incarnation = running(ranked)[0]
        pid = workers_of(ranked)[incarnation]
        (follower,) = followers_of(pid)
        os.kill((pid, follower)[rank], signum)
        assert asked.result(timeout=120) == expected
    assert answers(ranked) == expected  # if that was idle again already, a stopped rank is noticed now
    assert eventually(lambda: incarnation not in workers_of(ranked) and len(workers_of(ranked)) == 2, 90)
    assert not Path(f"/proc/{follower}").exists()
    assert becomes_idle(ranked)
