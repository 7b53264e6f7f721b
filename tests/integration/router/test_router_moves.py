"""Decode workers that drain: what they run goes on elsewhere with its KV, or stays, or is replayed."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import Overloaded, Reason, TransferError, Unavailable
from tandem.types import Role

PROMPT = (72, 105)
LENGTH = 12
AT = 5
"""Tokens that are there when the worker begins to drain."""


async def standing_at(cluster: Any, decode: Any, num_tokens: int = AT, **sampling: Any) -> Any:
    """A generation that stands still on `decode` with so many tokens."""
    decode.pause_at(num_tokens)
    call = cluster.generate(*PROMPT, **({"max_tokens": LENGTH} | sampling))
    await cluster.until(lambda: num_tokens in decode.offsets)
    return call


def placements(cluster: Any) -> list[tuple[str | None, str]]:
    (request,) = cluster.recorded.requests
    calls = [call for call in request.calls if call[0] == "Placed"]
    return [(prefill and prefill.worker_id, decode.worker_id) for _, prefill, decode, *_ in calls]


def replays(cluster: Any) -> int:
    (request,) = cluster.recorded.requests
    return sum(call[0] == "TryFailed" for call in request.calls)


@pytest.mark.parametrize("num_tokens", [2, AT, LENGTH - 1])
async def test_another_decode_worker_goes_on_and_no_prompt_is_computed_again(cluster: Any, num_tokens: int) -> None:
    prefill, old = await cluster.add_pair()
    call = await standing_at(cluster, old, num_tokens, logprobs=1)
    new = await cluster.add(Role.DECODE, "d1")
    old.offer_all()
    responses = [response async for response in call]

    assert [token for each in responses for token in each.token_ids] == cluster.completion(PROMPT, LENGTH)
    assert sum(len(each.logprobs) for each in responses) == LENGTH
    assert len(prefill.specs) == 1
    assert placements(cluster) == [("p0", "d0"), ("d0", "d1")]
    assert replays(cluster) == 0
    (handed,) = old.hand_overs
    (spec,) = new.specs
    assert len(spec.choices[0].output_token_ids) == handed.output_tokens == num_tokens - 1
    assert responses[-1].timings.transfer_bytes == 4096 + 2048


async def test_it_moves_on_as_often_as_its_worker_drains(cluster: Any) -> None:
    _, old = await cluster.add_pair()
    call = await standing_at(cluster, old)
    for name in ("d1", "d2"):
        new = await cluster.add(Role.DECODE, name)
        new.pause_at(old.offsets[0] + 2)
        old.offer_all()
        await cluster.until(lambda new=new: new.offsets == [new._pause_at])
        await cluster.until(lambda old=old: old.idle)  # released: the router knows that the hand-off is done
        await old.die()
        old = new
    old.let_go()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert replays(cluster) == 0


async def test_without_another_decode_worker_it_stays_until_there_is_one(cluster: Any) -> None:
    _, old = await cluster.add_pair()
    call = await standing_at(cluster, old)
    old.offer_all()
    new = await cluster.add(Role.DECODE, "d1", layout_fingerprint="another")
    old.offer_all()
    old.pause_at(AT + 2)
    old._notify()
    await cluster.until(lambda: old.offsets == [AT + 2])
    assert not new.specs
    await cluster.add(Role.DECODE, "d2")
    old.offer_all()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert placements(cluster)[1:] == [("d0", "d2")]


async def test_without_another_decode_worker_it_ends_where_it_is(cluster: Any) -> None:
    _, old = await cluster.add_pair()
    call = await standing_at(cluster, old)
    old.offer_all()
    old.let_go()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert placements(cluster) == [("p0", "d0")]


async def test_several_choices_go_on_together_where_the_old_worker_is_told_which(cluster: Any) -> None:
    prefill, old = await cluster.add_pair()
    call = await standing_at(cluster, old, n=2)
    new = await cluster.add(Role.DECODE, "d1")
    old.offer_all()
    tokens: dict[int, list[int]] = {0: [], 1: []}
    async for response in call:
        tokens[response.index] += response.token_ids
    assert tokens == {index: cluster.completion(PROMPT, LENGTH, index) for index in tokens}
    assert len(prefill.specs) == 1
    assert replays(cluster) == 0
    (handed,) = old.hand_overs
    (spec,) = new.specs
    assert list(handed.choices) == [each.index for each in spec.choices] == [0, 1]
    assert handed.output_tokens == min(len(each.output_token_ids) for each in spec.choices)


async def test_a_target_lost_in_mid_move_gives_a_replay(cluster: Any) -> None:
    prefill, old = await cluster.add_pair()
    call = await standing_at(cluster, old)
    new = await cluster.add(Role.DECODE, "d1")
    old.hold("hand_over")
    old.offer_all()
    await cluster.until(lambda: old.hand_overs)
    await new.die()
    await cluster.add(Role.DECODE, "d2")
    old.fall_ill(Unavailable("it drains", Reason.DRAINING))
    old.let_go()

    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert replays(cluster) > 0
    assert len(prefill.specs[-1].choices[0].output_token_ids) >= AT
    await cluster.until(lambda: old.idle)


@pytest.mark.parametrize("error", [None, Unavailable("it drains, too", Reason.DRAINING), Overloaded("it is full")])
async def test_a_target_that_makes_no_room_costs_nothing(cluster: Any, error: Any) -> None:
    prefill, old = await cluster.add_pair()
    call = await standing_at(cluster, old)
    new = await cluster.add(Role.DECODE, "d1")
    new.hold("reserve")
    old.offer_all()
    await cluster.until(lambda: new.specs)
    old.pause_at(AT + 2)
    old._notify()
    await cluster.until(lambda: old.offsets == [AT + 2])  # it runs on meanwhile
    if error is None:
        await new.die()
    else:
        new.fail_all(error)
    third = await cluster.add(Role.DECODE, "d2")
    third.pause_at(AT + 4)
    await cluster.until(lambda: third.specs or old.offer_all())

    third.let_go()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert placements(cluster)[-1] == ("d0", "d2")
    assert replays(cluster) == 0
    assert len(prefill.specs) == 1
    await cluster.until(lambda: old.idle and new.idle)


@pytest.mark.parametrize("stage", ["reserve", "hand_over"])
async def test_a_source_lost_in_mid_move_gives_a_replay(cluster: Any, stage: str) -> None:
    _, old = await cluster.add_pair()
    call = await standing_at(cluster, old)
    new = await cluster.add(Role.DECODE, "d1")
    (new if stage == "reserve" else old).hold(stage)
    old.offer_all()
    await cluster.until(lambda: new.specs and (stage == "reserve" or old.hand_overs))
    await old.die()
    new.let_go()

    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert replays(cluster) == 1
    await cluster.until(lambda: new.idle)


@pytest.mark.parametrize("by", ["source", "target"])
@pytest.mark.parametrize(
    "error", [TransferError("the wire is cut"), Unavailable("not now", Reason.DRAINING), Overloaded("it is full")]
)
async def test_a_move_that_fails_gives_a_replay(cluster: Any, by: str, error: Any) -> None:
    _, old = await cluster.add_pair()
    call = await standing_at(cluster, old)
    new = await cluster.add(Role.DECODE, "d1")
    old.hold("hand_over")
    old.offer_all()
    await cluster.until(lambda: old.hand_overs)
    (old if by == "source" else new).fail_all(error)
    old.let_go()

    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert replays(cluster) >= 1


async def test_a_client_that_leaves_in_mid_move_leaves_nothing_behind(cluster: Any) -> None:
    _, old = await cluster.add_pair()
    call = await standing_at(cluster, old)
    new = await cluster.add(Role.DECODE, "d1")
    old.hold("hand_over")
    old.offer_all()
    await cluster.until(lambda: old.hand_overs)
    call.cancel()
    await cluster.until(lambda: old.idle and new.idle)
