"""Workers that die, fail or fall silent in every stage: a right answer or a clear status, soon."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.errors import (
    ChecksumMismatch,
    InternalError,
    InvalidRequest,
    Overloaded,
    Reason,
    TransferError,
    Unavailable,
)
from tandem.types import Role

PROMPT = (72, 105)
LENGTH = 12
STAGES = ("reserve", "prefill", "first", "attach", "decode")
STATUS_WITHIN_S = 5.0


async def stand_still(cluster: Any, stage: str) -> tuple[Any, Any, Any]:
    """A generation that stands still in `stage` on the only pair."""
    prefill, decode = await cluster.add_pair()
    for worker in (prefill, decode):
        worker.hold(stage, "decode")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH, timeout_s=None)
    reached = prefill if stage == "prefill" else decode
    await cluster.until(lambda: not reached.idle)
    return call, prefill, decode


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_lost_worker_without_replacement_gives_a_status(cluster: Any, stage: str, role: Role) -> None:
    call, prefill, decode = await stand_still(cluster, stage)
    await (prefill if role is Role.PREFILL else decode).die()
    for worker in (prefill, decode):
        worker.let_go()
    try:
        async with asyncio.timeout(STATUS_WITHIN_S):
            error, code, _ = await cluster.error_of(call)
    except AssertionError:
        # Prefill had done its part, or was not yet asked when it died.
        assert (role, stage) == (Role.PREFILL, "decode")
        return
    assert code is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error, Unavailable)
    assert error.reason in {Reason.WORKER_LOST, Reason.NO_CAPABLE_WORKER}
    await cluster.until(lambda: prefill.idle and decode.idle)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_lost_worker_is_replaced_and_nothing_is_lost_or_repeated(cluster: Any, stage: str, role: Role) -> None:
    call, prefill, decode = await stand_still(cluster, stage)
    await cluster.add_pair("1")
    await (prefill if role is Role.PREFILL else decode).die()
    for worker in (prefill, decode):
        worker.let_go()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)


@pytest.mark.parametrize("after", range(1, LENGTH))
async def test_a_decode_worker_lost_after_any_token_continues_exactly(cluster: Any, after: int) -> None:
    _, decode = await cluster.add_pair()
    decode.pause_at(after)
    call = cluster.generate(*PROMPT, max_tokens=LENGTH, logprobs=1)
    await cluster.until(lambda: decode.offsets == [after])
    other_prefill, other_decode = await cluster.add_pair("1")
    await decode.die()
    responses = [response async for response in call]
    tokens = [token for response in responses for token in response.token_ids]
    assert tokens == cluster.completion(PROMPT, LENGTH)
    assert "".join(response.text for response in responses) == bytes(tokens).decode()
    assert [each.token_id for response in responses for each in response.logprobs] == tokens
    assert responses[-1].usage.completion_tokens == LENGTH
    (resumed,) = other_decode.specs
    (choice,) = resumed.choices
    assert (*resumed.prompt_token_ids, *choice.output_token_ids) == (*PROMPT, *tokens[: len(choice.output_token_ids)])
    assert len(choice.output_token_ids) <= after
    assert await _all_idle(cluster, other_prefill, other_decode)


async def _all_idle(cluster: Any, *workers: Any) -> bool:
    await cluster.until(lambda: all(worker.idle for worker in workers))
    return True


async def test_a_stop_string_may_straddle_a_replay(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    text = bytes(cluster.completion(PROMPT, LENGTH)).decode()
    decode.pause_at(5)
    call = cluster.generate(*PROMPT, max_tokens=LENGTH, stop=[text[3:7]])
    await cluster.until(lambda: decode.offsets == [5])
    await cluster.add_pair("1")
    await decode.die()
    responses = [response async for response in call]
    assert "".join(response.text for response in responses) == text[:3]
    assert responses[-1].stop_text == text[3:7]


async def test_prefill_may_die_once_decode_makes_tokens(cluster: Any) -> None:
    prefill, decode = await cluster.add_pair()
    decode.pause_at(4)
    call = cluster.generate(*PROMPT, max_tokens=LENGTH)
    await cluster.until(lambda: decode.offsets == [4])
    await prefill.die()
    decode.let_go()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)


@pytest.mark.parametrize("error", [TransferError("x"), ChecksumMismatch("x"), Overloaded("x")])
async def test_a_retryable_failure_is_tried_again_even_on_the_only_pair(cluster: Any, error: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH)
    await cluster.until(lambda: decode.offsets == [1])
    decode.fail_all(error)
    decode.let_go()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert len(decode.specs) == 2


async def test_a_worker_that_failed_is_left_alone_though_its_only_partner_was_blamed_as_well(cluster: Any) -> None:
    _, broken = await cluster.add_pair()
    broken.hold("decode")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH)
    await cluster.until(lambda: not broken.idle)
    other = await cluster.add(Role.DECODE, "d1")
    await _burden(cluster, other, pool=replace(other.load.pool, free=1, live=63))
    broken.fail_all(ChecksumMismatch("block 7"))
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert (len(broken.specs), len(other.specs)) == (1, 1)


async def test_a_refusal_does_not_tell_against_the_partner(cluster: Any) -> None:
    prefill, draining = await cluster.add_pair()
    draining.hold("decode")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH)
    await cluster.until(lambda: not draining.idle)
    busy_prefill, other = await cluster.add_pair("1")
    await _burden(cluster, busy_prefill, queued_prompt_tokens=500)
    draining.fail_all(Unavailable("this decode worker takes no new work", Reason.DRAINING))
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert [len(each.specs) for each in (prefill, draining, busy_prefill, other)] == [2, 1, 0, 1]


async def _burden(cluster: Any, worker: Any, **load: Any) -> None:
    """Returns once the router knows of the worker's new load."""
    worker.load = replace(worker.load, **load)
    await cluster.until(lambda: any(view.load == worker.load for view in cluster.router.workers.views()))


async def test_kv_lost_again_and_again_is_data_loss(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(max_retries=2, patience_s=0.1))
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT)
    for number in range(3):
        await cluster.until(lambda number=number: len(decode.specs) == number + 1 and not decode.idle)
        decode.fail_all(ChecksumMismatch("block 7"))
    error, code, tokens = await cluster.error_of(call)
    assert code is grpc.StatusCode.DATA_LOSS
    assert isinstance(error, ChecksumMismatch)
    assert tokens == cluster.completion(PROMPT, len(tokens))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InternalError("step failed"), grpc.StatusCode.INTERNAL),
        (InvalidRequest("sampling.top_k", "no"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_failure_that_no_other_pair_mends_is_passed_on(cluster: Any, error: Any, code: grpc.StatusCode) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT)
    await cluster.until(lambda: not decode.idle)
    decode.fail_all(error)
    told, status, _ = await cluster.error_of(call)
    assert status is code
    assert type(told) is type(error)
    assert len(decode.specs) == 1


async def test_a_stream_that_breaks_under_a_living_worker_is_opened_again(cluster: Any) -> None:
    prefill, _ = await cluster.add_pair()
    await prefill.stop_serving()
    error, _, _ = await cluster.error_of(cluster.generate(*PROMPT))
    assert "is not connected" in error.message
    await prefill.serve_again()
    await cluster.until(lambda: cluster.router.workers.readiness() is None)
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_request_whose_stream_broke_goes_on_with_the_same_worker(launch: Any, policy: Any, role: Role) -> None:
    cluster = await launch(policy=policy(patience_s=30.0))
    prefill, decode = await cluster.add_pair()
    decode.pause_at(3)
    call = cluster.generate(*PROMPT, max_tokens=LENGTH)
    await cluster.until(lambda: decode.offsets == [3])
    worker = prefill if role is Role.PREFILL else decode
    await worker.stop_serving()
    decode.let_go()
    await worker.serve_again()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
