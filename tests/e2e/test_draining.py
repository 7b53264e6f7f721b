"""A decode worker that is told to leave gives its streams to another one, with their KV: nothing is computed twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest

from bench.support.cluster import becomes_idle, eventually
from bench.support.fleet import Fleet
from bench.support.ports import free_ports
from shell.telemetry import metric_names as names
from tandem.client import AsyncClient, Client, GenerateOptions
from tandem.types import Role
from tests.scraped import fetch, total

NUM_STREAMS = 6
OUTPUT_TOKENS = 900
"""So many that no stream ends before the last one has begun."""
GRACE_S = "600"
"""So long that no test ends by it."""
Tokens: TypeAlias = dict[int, list[int]]
"""By choice."""
WORKERS = ((Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-0"), (Role.DECODE, "decode-1"))


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    """What earlier tests of this file left of a fleet with a router."""
    with Fleet(free_ports(1), options=("--drain-grace-seconds", GRACE_S)) as fleet:
        fleet.start_router(0)
        for role, name in WORKERS:
            fleet.start_worker(role, name)
        yield fleet


@pytest.fixture(scope="module")
def answers(running: Fleet) -> list[Tokens]:
    """Of every stream, while nothing happens."""
    with Client(running.target) as client, ThreadPoolExecutor(NUM_STREAMS) as callers:
        completions = callers.map(lambda each: client.complete(**options_of(each)), range(NUM_STREAMS))
        return [{each.index: list(each.token_ids) for each in completion.choices} for completion in completions]


@pytest.fixture
def fleet(running: Fleet, answers: list[Tokens]) -> Fleet:
    """One router and 1+2 workers."""
    for role, name in WORKERS:
        if name not in running.names:
            running.start_worker(role, name)
    return running


def options_of(stream: int, cache_salt: str = "") -> GenerateOptions:
    """Half of them are sampled, one has several choices; each has a prompt of its own."""
    prompt = [4 + (stream * 97 + i * 13) % 500 for i in range(100)]
    temperature = 0.9 if stream % 2 else 0.0
    return GenerateOptions(
        token_ids=prompt,
        max_tokens=OUTPUT_TOKENS,
        temperature=temperature,
        seed=stream,
        ignore_eos=True,
        n=1 + 2 * (stream == 5),
        cache_salt=cache_salt,
    )


def counted(client: Client, name: str, **labels: str) -> float:
    """Of the router's metrics. Not of the others: one of them may stand still."""
    return total(fetch(f"http://{client.status().admin_address}/metrics").decode(), name, **labels)


def num_handed_over(client: Client) -> float:
    return counted(client, names.PLACEMENTS.name, path="handed_over")


async def streams_during(target: str, disturb: Callable[[], None], cache_salt: str = "") -> list[Tokens]:
    """All tokens of every stream; `disturb` is called when each has begun."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]

    async def read(client: AsyncClient, stream: int) -> Tokens:
        tokens: Tokens = {}
        async for update in client.generate(**options_of(stream, cache_salt)):
            tokens.setdefault(update.index, []).extend(update.token_ids)
            if len(tokens[update.index]) > 1:
                begun[stream].set()
        return tokens

    async with AsyncClient(target) as client, asyncio.timeout(240), asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(read(client, stream)) for stream in range(NUM_STREAMS)]
        for each in begun:
            await each.wait()
        await asyncio.to_thread(disturb)
    return [task.result() for task in reading]


@pytest.mark.timeout(400)
async def test_streams_of_a_worker_that_leaves_go_on_with_their_kv(fleet: Fleet, answers: list[Tokens]) -> None:
    codes: list[int] = []
    with Client(fleet.target) as client:
        handed_over, moved = num_handed_over(client), counted(client, names.FAILED_TRIES.name)
        got = await streams_during(fleet.target, lambda: codes.append(fleet.stop("decode-0").code))

        assert got == answers
        assert codes == [0]
        assert num_handed_over(client) > handed_over
        assert counted(client, names.FAILED_TRIES.name) == moved, "a request was replayed"
        assert becomes_idle(client)


@pytest.mark.timeout(400)
async def test_a_target_that_is_killed_in_mid_move_costs_a_replay_and_no_token(
    fleet: Fleet, answers: list[Tokens]
) -> None:
    def disturb() -> None:
        # It answers nothing, so what leaves the other one waits for it; then it dies.
        before = num_handed_over(client)
        target = fleet.process("decode-1")
        target.send_signal(signal.SIGSTOP)
        fleet.process("decode-0").terminate()
        assert eventually(lambda: num_handed_over(client) > before)
        target.kill()

    fleet.start_worker(Role.DECODE, "decode-2")
    with Client(fleet.target) as client:
        # With a salt, for where prompts are cached already, their streams would go: to one worker, maybe.
        assert await streams_during(fleet.target, disturb, cache_salt="a second time") == answers
        assert becomes_idle(client)
