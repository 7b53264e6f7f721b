"""Elastic workers give the tokens of static ones, wherever prompts are computed, and while workers die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.same_tokens import Answers, ask_cluster
from bench.support.cluster import Cluster, becomes_idle, eventually, run_command, serve
from bench.support.random_requests import MAX_PRIORITY, make_requests
from shell.cores import usable_cores
from tandem.client import Client, Completion
from tandem.types import Role

REQUESTS = make_requests(60, seed=5)
PRIORITY = ("--max-priority", str(MAX_PRIORITY))
SMALL = ("--chunk-tokens", "64")
READY_S = 60


def answers_of(cluster: Cluster) -> Answers:
    return {name: _exact(answer) for name, answer in asyncio.run(ask_cluster(cluster.target, REQUESTS))[0].items()}


def _exact(answer: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in answer.items() if key != "logprobs"}


@pytest.fixture(scope="module")
def expected() -> Answers:
    """Of one worker that computes everything itself."""
    alone = ("--prefill", "0", "--decode", "1", "--local-prefill-tokens", "unlimited")
    with serve("demo", *alone, *PRIORITY) as cluster:
        return answers_of(cluster)


@contextlib.contextmanager
def mixture(transport: str) -> Iterator[Cluster]:
    """A router with two elastic workers, a prefill worker and a decode worker."""
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(run_command("router", "--model", "demo", "--listen", "127.0.0.1:0", *PRIORITY))
        options = ("--model", "demo", "--router", router.target, "--threads", "1", "--transport", transport, *SMALL)
        for command in ("worker", "worker", "prefill", "decode"):
            stack.enter_context(run_command(command, *options))
        with Client(router.target) as client:
            assert eventually(lambda: len(client.status().workers) == 4, READY_S)
        yield router


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_two_elastic_workers_give_the_tokens_of_one_that_does_all(transport: str, expected: Answers) -> None:
    options = ("--workers", "2", "--transport", transport, *SMALL, *PRIORITY)
    with serve("demo", *options) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=READY_S)
        assert answers_of(cluster) == expected
        assert {worker.info.role for worker in client.status().workers} == {Role.ELASTIC}
        assert becomes_idle(client, 10), client.status()


@pytest.mark.native
@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_workers_of_serve_use_each_others_cores() -> None:
    with serve("demo", "--workers", "2") as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=READY_S)
        assert eventually(lambda: len(client.status().workers) == 2, READY_S)
        client.complete("Once upon a time", max_tokens=20)
        names = [_thread_names(worker.info.pid) for worker in client.status().workers]
        assert any("tandem-guest" in of_worker for of_worker in names), names  # of who served it


def _thread_names(pid: int) -> set[str]:
    return {path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")}


@pytest.mark.timeout(240)
def test_elastic_workers_work_beside_static_ones(expected: Answers) -> None:
    with mixture("tcp") as cluster, Client(cluster.target) as client:
        assert answers_of(cluster) == expected
        assert Counter(worker.info.role for worker in client.status().workers)[Role.ELASTIC] == 2
        assert becomes_idle(client, 10), client.status()


@pytest.mark.timeout(240)
def test_an_elastic_worker_killed_in_the_middle_changes_no_token() -> None:
    requests = [{"token_ids": tuple(range(5, 65 + 40 * i)), "max_tokens": 300, "seed": i} for i in range(8)]
    with serve("demo", "--workers", "2", *SMALL) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=READY_S)
        assert eventually(lambda: len(client.status().workers) == 2, READY_S)
        options = {"n": 2, "ignore_eos": True, "temperature": 0.8, "timeout_s": 90}
        with ThreadPoolExecutor(len(requests)) as callers:
            calm = callers.map(lambda each: client.complete(**options, **each), requests)
            expected = [[choice.token_ids for choice in each.choices] for each in calm]
            futures: list[Future[Completion]] = []

            def many_run() -> bool:
                if all(future.done() for future in futures):  # asked again: whoever looks may be late
                    futures.extend(callers.submit(client.complete, **options, **each) for each in requests)
                return sum(worker.load.running_seqs for worker in client.status().workers) > 4

            assert eventually(many_run, 20)
            busiest = max(client.status().workers, key=lambda worker: worker.load.pool.live)
            os.kill(busiest.info.pid, signal.SIGKILL)
            completions = [future.result(timeout=120) for future in futures]
        found = [[choice.token_ids for choice in each.choices] for each in completions]
        assert found == expected * (len(found) // len(expected))
