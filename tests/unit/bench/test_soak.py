"""What a soak calls a violation. Each check must be able to fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.soak import calls as soak_calls
from bench.soak.calls import (
    MODEL_CHANGED,
    STOOD_STILL,
    Ended,
    Kind,
    Manner,
    Said,
    call,
    draw_requests,
    learn,
    wrong,
)
from bench.soak.changes import GUEST, NEW_WEIGHTS
from bench.soak.faults import Faults
from bench.soak.round import MORE_DESCRIPTORS, MORE_MAPPINGS, MORE_RSS_BYTES, MORE_THREADS, Account, leaks
from bench.soak.storm import _stop, summary
from bench.support.cluster import Cluster, eventually
from bench.support.processes import Usage, children
from bench.support.random_requests import RandomRequest
from bench.support.resetting_proxy import ResettingProxy
from tandem.client import AsyncClient
from tandem.errors import InternalError, Reason, TandemError, Unavailable
from tests.answering_client import AnsweringClient, text_of
from tests.manual_clock import ManualClock
from tests.waiting_program import waiting_program

LOST = Unavailable("gone", Reason.WORKER_LOST)
USAGE = Usage(pid=7, descriptors=30, threads=15, rss_bytes=300_000_000, shared_mappings=1)


async def kind_of(*choices: list[int], streams: bool = True) -> Kind:
    (kind,) = await learn(AnsweringClient(*choices), [RandomRequest("k", {"prompt": "p"}, streams)])
    return kind


async def seen(client: AnsweringClient, manner: Manner = Manner.PLAIN, *, streams: bool = True) -> Ended:
    kind = await kind_of([1, 2, 3], [4, 5], streams=streams)
    return await call(client, kind, manner, Random(1), ManualClock())


@pytest.mark.parametrize("streams", [True, False])
async def test_the_right_answer_is_ok(streams: bool) -> None:
    ended = await seen(AnsweringClient([1, 2, 3], [4, 5]), streams=streams)

    assert (ended.outcome, ended.complaint) == ("ok", "")


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    "choices", [([1, 2], [4, 5]), ([1, 2, 9], [4, 5]), ([1, 2, 3, 3], [4, 5]), ([1, 2, 3],), ([1, 2, 3], [4, 5], [6])]
)
async def test_another_answer_is_a_violation(choices: tuple[list[int], ...], streams: bool) -> None:
    assert (await seen(AnsweringClient(*choices), streams=streams)).complaint


TWO_MODELS = {"old": {0: Said((1, 2, 3), "bcd", "length")}, "new": {0: Said((5, 6, 7), "fgh", "length")}}


@pytest.mark.parametrize(
    ("tokens", "succeeded", "sort"),
    [
        ((1, 2, 3), True, ""),
        ((5, 6, 7), True, ""),
        ((5, 6), False, ""),
        ((1, 6, 7), True, "mixed"),
        ((9, 6, 7), False, "wrong"),
    ],
)
def test_an_answer_belongs_to_one_of_the_models_whole(tokens: tuple[int, ...], succeeded: bool, sort: str) -> None:
    said = Said(tokens, text_of(tokens), "length" if succeeded else "")

    assert wrong({0: said}, TWO_MODELS, succeeded=succeeded).partition(":")[0] == sort


def refusal() -> Unavailable:
    """As a router refuses a stream that no equal model can go on with."""
    error = Unavailable("the model changed", Reason.WORKER_LOST)
    error.reason = MODEL_CHANGED  # type: ignore[assignment]
    return error


@pytest.mark.parametrize(
    ("heard", "error", "outcome", "complaint"),
    [
        ([1, 2], refusal(), MODEL_CHANGED, ""),
        ([1, 2], LOST, "WORKER_LOST", ""),
        ([1, 9], LOST, "WORKER_LOST", "differs"),
        ([1], Unavailable("UNAVAILABLE: Socket closed", Reason.WORKER_LOST), "connection lost", ""),
        ([1], InternalError("bug"), "INTERNAL", "unexplained"),
    ],
    ids=["model changed", "worker lost", "wrong token", "connection lost", "bug"],
)
async def test_a_failed_call_is_a_violation_if_no_fault_explains_it_or_a_token_was_wrong(
    heard: list[int], error: TandemError, outcome: str, complaint: str
) -> None:
    ended = await seen(AnsweringClient(heard, [], error=error))

    assert (ended.outcome, ended.num_tokens) == (outcome, len(heard))
    assert complaint in ended.complaint
    assert bool(ended.complaint) == bool(complaint)


@pytest.mark.parametrize("manner", [Manner.PLAIN, Manner.PATIENT, Manner.HURRIED])
async def test_a_call_that_does_not_end_is_a_hang(monkeypatch: pytest.MonkeyPatch, manner: Manner) -> None:
    for name in ("DEADLINE_S", "LONGEST_S", "OVERRUN_S"):
        monkeypatch.setattr(soak_calls, name, 0.01)

    ended = await seen(AnsweringClient([1, 2, 3], [4, 5], hangs=True), manner)

    assert ended.outcome == "hung"
    assert "no end" in ended.complaint


async def test_a_caller_that_leaves_early_is_no_violation() -> None:
    ended = await seen(AnsweringClient([1, 2], [], hangs=True), Manner.CANCELS)

    assert (ended.outcome, ended.complaint) == ("left", "")


def test_the_same_seed_draws_the_same_requests_and_some_want_several_choices() -> None:
    requests = draw_requests(60, 3)

    assert requests == draw_requests(60, 3) != draw_requests(60, 4)
    assert 1 < sum("n" in each.options for each in requests) < 40
    assert all(sum(name in each.options for each in requests) > 1 for name in ("beam_width", "regex", "cache_salt"))


def test_a_survivor_may_not_hold_more_than_its_slack() -> None:
    slack = replace(
        USAGE,
        descriptors=USAGE.descriptors + MORE_DESCRIPTORS,
        threads=USAGE.threads + MORE_THREADS,
        rss_bytes=USAGE.rss_bytes + MORE_RSS_BYTES,
        shared_mappings=USAGE.shared_mappings + MORE_MAPPINGS,
    )
    assert leaks({"router": USAGE}, {"router": slack}) == []
    for more in (
        replace(slack, descriptors=slack.descriptors + 1),
        replace(slack, threads=slack.threads + 1),
        replace(slack, rss_bytes=slack.rss_bytes + 1),
        replace(slack, shared_mappings=slack.shared_mappings + 1),
    ):
        assert len(leaks({"router": USAGE}, {"router": more})) == 1


def test_lost_connections_and_refusals_to_be_sent_again_are_not_in_the_share_of_what_stayed() -> None:
    calls = {"plain": {"ok": 3, "WORKER_LOST": 1, "connection lost": 5, MODEL_CHANGED: 7}}

    assert (account({}, calls).wanted, account({}, calls).stayed) == (16, 4)


def test_children_are_known_by_name(tmp_path: Path) -> None:
    with (
        waiting_program(tmp_path, "decode_worker", "--threads=1", "--worker-id=decode-7") as worker,
        waiting_program(tmp_path, "other", "--worker-id=decode-8"),
        waiting_program(tmp_path, "router") as router,
    ):
        wanted = {"decode-7": worker.pid, "router": router.pid}
        assert eventually(lambda: children(os.getpid()) == wanted)  # a command line is there a moment after its start


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_what_a_cancelled_storm_froze_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    with waiting_program(tmp_path, "decode_worker", "--worker-id=decode-0") as worker:
        operator = AsyncClient("127.0.0.1:1")
        faults = Faults(os.getpid(), 1, operator, [], Random(1), said.append)
        freezing = asyncio.create_task(faults._frozen("freeze", ("decode-0", worker.pid), 60.0))
        assert await asyncio.to_thread(eventually, lambda: is_stopped(worker.pid))
        freezing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await freezing

        assert await asyncio.to_thread(eventually, lambda: not is_stopped(worker.pid))
        await operator.close()
    assert said == ["freeze: decode-0", "decode-0 goes on"]
    assert faults.counts == {"freeze": 1}


def test_a_process_that_outlives_the_cluster_is_a_leak(tmp_path: Path) -> None:
    (tmp_path / "decode_worker.py").write_text("import time; time.sleep(60)")
    script = (
        "import signal, subprocess, sys; signal.signal(15, lambda *_: sys.exit(0))\n"
        "child = subprocess.Popen([sys.executable, '-m', 'decode_worker', '--worker-id=decode-0'])\n"
        "print(child.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert eventually(lambda: children(process.pid) == {"decode-0": child})
            assert _stop(Cluster(process, "", [])) == [f"leak: decode-0 (pid {child}) outlives tandem serve"]
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 3])
def test_a_cluster_that_does_not_leave_with_0_is_a_violation(code: int) -> None:
    script = f"import signal, sys; signal.signal(15, lambda *_: sys.exit({code})); print(1, flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()

        assert bool(_stop(Cluster(process, "", []))) == bool(code)


def account(faults: dict[str, int], calls: dict[str, dict[str, int]], *violations: str) -> Account:
    empty: dict[str, dict[str, int]] = {manner.value: {} for manner in Manner}
    return Account("round 0", 1.0, faults, empty | calls, 0.0, violations)


def test_a_run_in_which_nothing_happened_is_no_success() -> None:
    faults = {"kill": 1, NEW_WEIGHTS: 1, GUEST: 1}
    happened = account(faults, {"plain": {"ok": 3, "WORKER_LOST": 1}})

    assert summary(1, 2.0, [happened])["violations"] == []
    assert summary(1, 2.0, [account({}, {"plain": {"ok": 3}})])["violations"]
    assert summary(1, 2.0, [account(faults, {"plain": {"WORKER_LOST": 3}})])["violations"]
    for lacking in faults:
        others = {what: count for what, count in faults.items() if what != lacking}
        assert summary(1, 2.0, [account(others, {"plain": {"ok": 3}})])["violations"], lacking
    found = summary(1, 2.0, [happened, account({}, {}, "hang: 1")])
    assert found["violations"] == ["round 0: hang: 1"]
    assert found["found"] == {"wrong": 0, "mixed": 0, "hang": 1, "leak": 0}


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(100):
            writer.write(data)
    writer.close()


@contextlib.asynccontextmanager
async def proxied() -> AsyncIterator[tuple[ResettingProxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = ResettingProxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server, proxy.listening() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        yield proxy, reader, writer
        writer.close()


async def test_the_proxy_passes_bytes_both_ways_until_it_resets() -> None:
    async with proxied() as (proxy, reader, writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"

        assert proxy.reset() == 2

        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_a_limit_that_this_process_noticed_late_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_calls, "OVERRUN_S", 0.01)
    clock = ManualClock()
    calling = asyncio.create_task(
        call(AnsweringClient([1], hangs=True), await kind_of([1]), Manner.HURRIED, Random(1), clock)
    )
    await asyncio.sleep(0)
    clock.advance_s(5.0)
    ended = await calling

    assert (ended.outcome, ended.complaint) == (STOOD_STILL, "")
