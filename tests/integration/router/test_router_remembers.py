"""Sick workers among healthy ones, and workers that come back: no request fails for want of memory or of patience."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.errors import HandshakeMismatch, InternalError, Overloaded, PeerLost, Reason, TandemError, Unavailable
from tandem.types import Role

PROMPT = (72, 105)
LENGTH = 4
RESTART_S = 2.0


def broken_logits() -> InternalError:
    """As a worker tells it whose weights or memory are damaged."""
    error = InternalError("the logits of request r are not finite")
    error.retryable = True
    return error


async def add(cluster: Any, role: Role, number: int, error: TandemError | None = None, **load: Any) -> list[Any]:
    """So many workers; those with an error fail at once whatever they are asked for."""
    kind = "sick" if error is not None else "well"
    added = [await cluster.add_unchecked(role, f"{role}-{kind}-{index}") for index in range(number)]
    for worker in added:
        worker.fall_ill(error)
        worker.load = replace(worker.load, **load)
    await cluster.until(
        lambda: all(
            any(view.info == each.info and view.obstacle is None and view.load == each.load for view in views)
            for views in [cluster.router.workers.views()]
            for each in added
        )
    )
    return added


async def completions(cluster: Any, number: int, at_once: int) -> list[list[int]]:
    """What so many requests were answered; raises what one failed with."""
    places = asyncio.Semaphore(at_once)

    async def one() -> list[int]:
        async with places:
            tokens: list[int] = await cluster.read_tokens(cluster.generate(*PROMPT, max_tokens=LENGTH))
            return tokens

    return await asyncio.gather(*(one() for _ in range(number)))


def all_right(cluster: Any, answers: Sequence[list[int]]) -> bool:
    return all(answer == cluster.completion(PROMPT, LENGTH) for answer in answers)


@pytest.mark.parametrize("error", [PeerLost("connection refused"), HandshakeMismatch("protocol", "3", "4")])
async def test_prefill_workers_whose_kv_path_is_down_fail_no_request_beside_busy_ones(cluster: Any, error: Any) -> None:
    await add(cluster, Role.DECODE, 1)
    busy = await add(cluster, Role.PREFILL, 8, queued_prompt_tokens=1000)
    sick = await add(cluster, Role.PREFILL, 3, error)
    assert all_right(cluster, await completions(cluster, 30, at_once=6))
    assert sum(len(worker.specs) for worker in busy) >= 30
    tried = sum(len(worker.specs) for worker in sick)
    assert all_right(cluster, await completions(cluster, 30, at_once=6))
    assert sum(len(worker.specs) for worker in sick) - tried < 10  # they are remembered, and only probed


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_one_worker_with_broken_logits_fails_no_request(cluster: Any, role: Role) -> None:
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    await add(cluster, other, 1)
    await add(cluster, role, 8, queued_prompt_tokens=1000)
    (sick,) = await add(cluster, role, 1, broken_logits())
    assert all_right(cluster, await completions(cluster, 30, at_once=6))
    assert len(sick.specs) < 15


async def test_a_request_that_breaks_on_two_workers_is_at_fault_itself(cluster: Any) -> None:
    await add(cluster, Role.PREFILL, 1)
    sick = await add(cluster, Role.DECODE, 4, broken_logits())
    error, code, _ = await cluster.error_of(cluster.generate(*PROMPT))
    assert code is grpc.StatusCode.INTERNAL
    assert "not finite" in error.message
    assert sum(len(worker.specs) for worker in sick) == 2
    assert max(len(worker.specs) for worker in sick) == 1
    assert [each.set_aside for each in cluster.router.status.cluster().workers] == [""] * 5


@pytest.mark.parametrize(
    "error", [Unavailable("no", Reason.WORKER_LOST), Unavailable("no"), Overloaded("full"), PeerLost("no")]
)
async def test_decode_workers_that_fail_at_once_take_no_request_from_an_honest_one(cluster: Any, error: Any) -> None:
    await add(cluster, Role.PREFILL, 1)
    await add(cluster, Role.DECODE, 3, error)
    (honest,) = await add(cluster, Role.DECODE, 1)
    honest.load = replace(honest.load, pool=replace(honest.load.pool, free=8, live=56))
    assert all_right(cluster, await completions(cluster, 200, at_once=8))


async def test_a_worker_that_was_set_aside_is_probed_and_comes_back(cluster: Any) -> None:
    await add(cluster, Role.PREFILL, 1)
    await add(cluster, Role.DECODE, 1)
    (sick,) = await add(cluster, Role.DECODE, 1, Unavailable("no"))

    def words() -> str:
        return next(each for each in cluster.router.status.cluster().workers if each.info == sick.info).set_aside

    while not words():
        await completions(cluster, 1, at_once=1)
    assert words().startswith("set aside")
    sick.fall_ill(None)
    num_asked = len(sick.specs)
    while words():
        await completions(cluster, 4, at_once=4)
    assert len(sick.specs) - num_asked <= 4


async def test_a_worker_that_drains_is_not_set_aside(cluster: Any) -> None:
    await add(cluster, Role.PREFILL, 1)
    (sick,) = await add(cluster, Role.DECODE, 1, Unavailable("it drains", Reason.DRAINING))
    await add(cluster, Role.DECODE, 1)
    while len(sick.specs) < 5:
        await completions(cluster, 4, at_once=4)
    assert not any(view.set_aside for view in cluster.router.workers.views())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_worker_that_comes_back_soon_costs_no_request(launch: Any, role: Role) -> None:
    cluster = await launch()
    pair = dict(zip((Role.PREFILL, Role.DECODE), await cluster.add_pair(), strict=True))
    decode = pair[Role.DECODE]
    for worker in pair.values():
        worker.hold("attach")
    decode.pause_at(2)
    calls = [cluster.generate(*PROMPT, max_tokens=LENGTH) for _ in range(16)]
    await cluster.until(lambda: not pair[role].idle)
    await pair[role].die()
    for worker in pair.values():
        worker.let_go()
    late = cluster.generate(*PROMPT, max_tokens=LENGTH)
    await asyncio.sleep(RESTART_S)
    await cluster.add(role, f"{role}-again")
    answers = await asyncio.gather(*(cluster.read_tokens(call) for call in (*calls, late)))
    assert all_right(cluster, answers)
