"""A decode worker that is told to leave gives its streams to another one, with their KV: nothing is computed twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest

from bench.cluster import becomes_idle, eventually
from bench.fleet import Fleet
from bench.ports import free_ports
from tandem.client import AsyncClient, Client, GenerateOptions
from tandem.telemetry import metric_names as names
from tandem.types import Role
from tests.scraped import fetch, total

NUM_STREAMS = 6
OUTPUT_TOKENS = 900
"""So many that no stream ends before the last one has begun."""
GRACE_S = "600"
"""So long that no test ends by it."""


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(free_ports(1), options=("--drain-grace-seconds", GRACE_S)) as fleet:
        fleet.start_router(0)
        for role, name in ((Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-0"), (Role.DECODE, "decode-1")):
            fleet.start_worker(role, name)
        yield fleet


def options_of(stream: int) -> GenerateOptions:
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
    )


def counted(client: Client, name: str, **labels: str) -> float:
    """Of the router's metrics. Not of the others: one of them may stand still."""
    return total(fetch(f"http://{client.status().admin_address}/metrics").decode(), name, **labels)


Tokens: TypeAlias = dict[int, list[int]]
"""By choice."""


def expected(client: Client) -> list[Tokens]:
    with ThreadPoolExecutor(NUM_STREAMS) as callers:
        answers = callers.map(lambda each: client.complete(**options_of(each)), range(NUM_STREAMS))
        return [{each.index: list(each.token_ids) for each in answer.choices} for answer in answers]


async def streams_during(target: str, disturb: Callable[[], None]) -> list[Tokens]:
    """All tokens of every stream; `disturb` is called when each has begun."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]

    async def read(client: AsyncClient, stream: int) -> Tokens:
        tokens: Tokens = {}
        async for update in client.generate(**options_of(stream)):
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
async def test_streams_of_a_worker_that_leaves_go_on_with_their_kv(fleet: Fleet) -> None:
    codes: list[int] = []
    with Client(fleet.target) as client:
        answers = await asyncio.to_thread(expected, client)
        got = await streams_during(fleet.target, lambda: codes.append(fleet.stop("decode-0").code))

        assert got == answers
        assert codes == [0]
        assert counted(client, names.PLACEMENTS.name, path="handed_over") > 0
        assert counted(client, names.REQUEST_MOVES.name) == 0, "a request was replayed"
        assert becomes_idle(client)


@pytest.mark.timeout(400)
async def test_a_target_that_is_killed_in_mid_hand_over_costs_a_replay_and_no_token(fleet: Fleet) -> None:
    def disturb() -> None:
        # It answers nothing, so what leaves the other one waits for it; then it dies.
        target = fleet.process("decode-1")
        target.send_signal(signal.SIGSTOP)
        fleet.process("decode-0").terminate()
        assert eventually(lambda: counted(client, names.PLACEMENTS.name, path="handed_over") > 0)
        target.kill()

    fleet.start_worker(Role.DECODE, "decode-2")
    with Client(fleet.target) as client:
        answers = await asyncio.to_thread(expected, client)
        assert await streams_during(fleet.target, disturb) == answers
        assert becomes_idle(client)
