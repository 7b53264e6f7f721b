"""`kill -9` of either worker with requests in every stage; cancels and deadlines in every stage."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from bench.support.cluster import becomes_idle, eventually, pid_of, serve
from tandem.client import Client
from tandem.errors import TandemError
from tandem.types import Role

NUM_CALLERS = 24
STATUS_WITHIN_S = 16.0
"""The lease, the router's patience, and a second."""
STALL_BORNE_S = 2.0
OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call ended."""

    token_ids: tuple[int, ...]
    error: TandemError | None
    ended_s: float


Outcomes = Callable[[], list[Outcome]]
"""Waits for them."""


@pytest.fixture(scope="module")
def fragile() -> Iterator[Client]:
    """A cluster of its own, small enough that two dozen requests fill every stage."""
    options = ("--prefill", "1", "--decode", "1", "--max-seqs", "4", "--chunk-tokens", "128", "--kv-blocks", "400")
    with serve("demo", *options) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        yield client


@pytest.fixture(autouse=True)
def nothing_leaks(fragile: Client) -> Iterator[None]:
    yield
    fragile.wait_ready(timeout_s=30)
    assert becomes_idle(fragile, 15), fragile.status()


def prompt_of(caller: int) -> tuple[int, ...]:
    rng = random.Random(caller)
    return tuple(rng.randrange(4, 600) for _ in range(rng.choice((20, 200, 900))))


def call(client: Client, caller: int, begun: threading.Semaphore) -> Outcome:
    token_ids: list[int] = []
    error = None
    try:
        for update in client.generate(
            token_ids=prompt_of(caller), max_tokens=OUTPUT_TOKENS, temperature=1.0, seed=caller, ignore_eos=True
        ):
            token_ids += update.token_ids
            if len(token_ids) == len(update.token_ids):
                begun.release()
    except TandemError as raised:
        error = raised
    return Outcome(tuple(token_ids), error, time.monotonic())


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still while inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # `serve` has replaced it
            os.kill(pid, signal.SIGCONT)


@contextmanager
def calls_in_every_stage(client: Client) -> Iterator[Outcomes]:
    """Calls of all callers; inside, three have their first token, and the others prefill or wait."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        futures = [callers.submit(call, client, caller, begun) for caller in range(NUM_CALLERS)]
        for _ in range(3):
            assert begun.acquire(timeout=30)
        yield lambda: [future.result(timeout=60) for future in futures]


@pytest.fixture(scope="module")
def expected(fragile: Client) -> list[tuple[int, ...]]:
    """The tokens of each caller, while nobody is killed."""
    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        return [
            each.token_ids
            for each in callers.map(lambda caller: call(fragile, caller, threading.Semaphore(0)), range(NUM_CALLERS))
        ]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_every_caller_gets_its_tokens_for_the_only_worker_that_was_killed_comes_back(
    fragile: Client, expected: list[tuple[int, ...]], role: Role
) -> None:
    assert {len(each) for each in expected} == {OUTPUT_TOKENS}
    pid = pid_of(fragile, role)

    with calls_in_every_stage(fragile) as outcomes:
        os.kill(pid, signal.SIGKILL)

    assert [outcome.error for outcome in outcomes()] == [None] * NUM_CALLERS
    assert [outcome.token_ids for outcome in outcomes()] == expected
    fragile.wait_ready(timeout_s=30)
    again = fragile.complete(token_ids=prompt_of(0), max_tokens=OUTPUT_TOKENS, temperature=1.0, seed=0, ignore_eos=True)
    assert again.choices[0].token_ids == expected[0]
    assert pid_of(fragile, role) != pid


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_that_stands_still_costs_its_callers_no_more_than_a_status_in_time(
    fragile: Client, role: Role
) -> None:
    pid = pid_of(fragile, role)

    with calls_in_every_stage(fragile) as outcomes, stopped(pid):
        stopped_s = time.monotonic()
        failed = [outcome for outcome in outcomes() if outcome.error is not None]

    assert all(outcome.ended_s - stopped_s < STATUS_WITHIN_S for outcome in failed)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_that_stands_still_for_two_seconds_loses_nobody(fragile: Client, role: Role) -> None:
    pid = pid_of(fragile, role)

    with calls_in_every_stage(fragile) as outcomes, stopped(pid):
        time.sleep(STALL_BORNE_S)

    assert [outcome.error for outcome in outcomes()] == [None] * NUM_CALLERS
    assert pid_of(fragile, role) == pid


def test_with_a_second_decode_worker_nobody_notices_that_one_was_killed(expected: list[tuple[int, ...]]) -> None:
    """Streams go on at the next token: nothing lost, nothing repeated, sampled requests included.

    Without caches: prompts that a decode worker knows would all be with that one, and over before it is killed.
    """
    options = ("--prefill", "1", "--decode", "2", "--no-prefix-cache")
    begun, moved = threading.Semaphore(0), threading.Event()

    def keep_calling(caller: int) -> list[Outcome]:
        """So that the kill meets calls under way, however late it comes."""
        outcomes = [call(client, caller, begun)]
        while not moved.is_set():
            outcomes.append(call(client, caller, begun))
        return outcomes

    with serve("demo", *options) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        assert eventually(lambda: len(client.status().workers) == 3, 30)
        with ThreadPoolExecutor(8) as callers:
            calling = [callers.submit(keep_calling, caller) for caller in range(8)]
            try:
                for _ in range(6):
                    assert begun.acquire(timeout=30)
                workers = [worker for worker in client.status().workers if worker.info.role is Role.DECODE]
                busiest = max(workers, key=lambda worker: worker.load.pool.live)
                os.kill(busiest.info.pid, signal.SIGKILL)
                assert eventually(lambda: any("request is tried again" in line for line in cluster.log))
            finally:
                moved.set()

        for caller, outcomes in enumerate(calling):
            assert {outcome.error for outcome in outcomes.result()} == {None}
            assert {outcome.token_ids for outcome in outcomes.result()} == {expected[caller]}
