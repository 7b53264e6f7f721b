"""Clusters that change under load: callers that check every token must notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from bench import scaling
from bench.support.cluster import becomes_idle
from bench.support.fleet import Fleet
from bench.support.ports import free_ports
from bench.support.witness import Witness, story_questions
from tandem.client import Client
from tandem.types import Role

LONG = 300
"""Tokens of a stream that outlasts a drain's grace of a fraction of a second."""


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    """What earlier tests of this file left of a fleet with a router, whose grace is shorter than its streams."""
    with Fleet(free_ports(1), options=("--drain-grace-seconds", "0.2")) as fleet:
        fleet.start_router(0)
        yield fleet


@pytest.fixture
def fleet(running: Fleet) -> Fleet:
    """One router and 2+2 workers."""
    for role in (Role.PREFILL, Role.DECODE):
        for index in range(2):
            if f"{role.value}-{index}" not in running.names:
                running.start_worker(role, f"{role.value}-{index}")
    return running


@contextlib.asynccontextmanager
async def under_load(fleet: Fleet, max_tokens: int = LONG) -> AsyncIterator[Witness]:
    witness = Witness(fleet.target, 4, story_questions(4, max_tokens))
    async with witness.watching():
        await witness.see(4)
        yield witness


@pytest.mark.timeout(1500)
def test_growing_shrinking_and_restarting_everything_loses_no_request_and_no_token() -> None:
    outcome = scaling.run(callers=4, max_tokens=48, requests_per_phase=8, transport="auto")

    assert outcome.errors == ()
    assert {each.code for each in outcome.exits} == {0}
    assert min(each.requests for each in outcome.accounts) >= 8
    assert len(outcome.accounts) == 11


async def test_streams_that_outlast_a_decode_workers_grace_go_on_elsewhere(fleet: Fleet) -> None:
    async with under_load(fleet) as witness:
        left = await asyncio.to_thread(fleet.stop, "decode-0")
        await witness.see(8)

    assert left.code == 0
    assert [each.error for each in witness.sightings if each.error] == []


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_second_sigterm_ends_a_worker_at_once_and_no_request_fails(fleet: Fleet, name: str) -> None:
    async with under_load(fleet) as witness:
        left = await asyncio.to_thread(fleet.stop_twice, name)
        await witness.see(8)

    assert [each.error for each in witness.sightings if each.error] == []
    assert left.code in {0, 143}  # 0 = it had nothing left to wait for when the first one came
    with Client(fleet.target) as client:
        assert becomes_idle(client)


async def test_a_second_sigterm_ends_a_router_at_once_and_its_workers_let_go(fleet: Fleet) -> None:
    witness = Witness(fleet.target, 4, story_questions(4, 2 * LONG))
    async with witness.watching():
        await witness.see(4)
        left = await asyncio.to_thread(fleet.stop_twice, "router-0")
        await witness.see(4)
        await asyncio.to_thread(fleet.start_router, 0)
        await witness.see(12)

    assert left.code == 143
    assert any("UNAVAILABLE" in each.error or "WORKER_LOST" in each.error for each in witness.sightings)
    with Client(fleet.target) as client:
        client.wait_ready(timeout_s=30)
        assert becomes_idle(client)
