"""What callers ask of a small pool, how small it is, and what counts as a violation."""

from __future__ import annotations

from typing import Any

import pytest

from bench.small_pool import Account, _ask, blocks_of, draw, largest_need
from bench.soak_calls import Kind, Said, learn
from bench.support.random_requests import RandomRequest
from tandem.errors import Reason, Unavailable
from tests.answering_client import AnsweringClient


def account_of(**changes: Any) -> Account:
    return Account(demand_blocks=100, pool_blocks=25, **changes)


async def seen(client: Any, request: RandomRequest) -> Account:
    (kind,) = await learn(AnsweringClient([1, 2, 3], [4, 5]), [request])
    account = account_of()
    await _ask(client, kind, account)
    return account


def test_every_sort_is_drawn_and_the_same_again() -> None:
    requests = draw(40, 3)

    assert {each.name.partition("-")[0] for each in requests} == {"any", "alike", "beams", "grammar"}
    assert draw(40, 3) == requests
    for each in requests:
        sort = each.name.partition("-")[0]
        assert (sort == "beams") == ("beam_width" in each.options)
        assert (sort == "grammar") == bool({"regex", "choice", "json_schema"} & each.options.keys())
        assert (sort == "alike") == ("cache_salt" in each.options)
        assert len({"prompt", "token_ids", "messages"} & each.options.keys()) == 1
        assert each.options["max_tokens"] >= 1


def test_prompts_of_a_sort_begin_alike() -> None:
    beginnings = {tuple(each.options["token_ids"][:160]) for each in draw(40, 3) if each.name.startswith("alike")}

    assert len(beginnings) == 2


@pytest.mark.parametrize(
    ("options", "lengths", "blocks", "need"),
    [
        ({"max_tokens": 16}, [16], 2, 1 + 3),
        ({"max_tokens": 16, "n": 2}, [16, 17], 2 + 3, 1 + 2 * 3),
        ({"max_tokens": 16, "n": 1, "beam_width": 3}, [17], 3 * 3, 1 + 3 * 3),
    ],
)
def test_demand_counts_each_sequence_whole(options: dict[str, Any], lengths: list[int], blocks: int, need: int) -> None:
    answer = {index: Said((0,) * length) for index, length in enumerate(lengths)}
    kind = Kind(RandomRequest("k", options, streams=True), {"": answer})

    assert blocks_of(kind, num_prompt_tokens=16, block_size=16) == blocks
    assert largest_need(kind, num_prompt_tokens=16, block_size=16) == need


async def test_a_right_answer_is_served_and_counts_its_sequences() -> None:
    account = await seen(AnsweringClient([1, 2, 3], [4, 5]), RandomRequest("any-1", {"prompt": "p"}, streams=True))

    assert (account.violations, account.served, account.sequences) == ([], {"any": 1}, 2)


async def test_a_wrong_answer_and_a_failure_are_violations() -> None:
    request = RandomRequest("beams-1", {"prompt": "p", "beam_width": 4}, streams=True)

    assert "wrong: beams-1" in (await seen(AnsweringClient([1, 2], [4, 5]), request)).violations[0]
    lost = AnsweringClient([1], error=Unavailable("gone", Reason.WORKER_LOST))
    assert "failed: beams-1: WORKER_LOST" in (await seen(lost, request)).violations[0]


def test_waste_and_a_pool_that_was_never_full_are_violations() -> None:
    good = account_of(waste=[0.03], counters={"tandem_preemptions_total": 1})
    bad = account_of(waste=[0.05], counters={"tandem_preemptions_total": 0})
    for each in (good, bad):
        each.judge()

    assert good.violations == []
    assert [what.partition(":")[0] for what in bad.violations] == ["waste", "shows none"]
