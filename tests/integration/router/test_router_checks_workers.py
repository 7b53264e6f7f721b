"""A worker that says what cannot be true: its word is not passed on, and the request is continued elsewhere."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tandem.errors import InvalidOutput
from tandem.types import FinishReason

PROMPT = (72, 105)
LENGTH = 12
END = 256
LIES: dict[str, tuple[tuple[int, ...], FinishReason | None]] = {
    "beyond the vocabulary": ((4_000_000_000,), None),
    "the first id beyond it": ((260,), None),
    "beyond the vocabulary, among others": ((97, 98, 4_000_000_000, 99), None),
    "more tokens than asked for": ((97,) * 100_001, None),
    "one token too many": ((97,) * LENGTH, FinishReason.LENGTH),
    "an end by length before it": ((97,), FinishReason.LENGTH),
    "an end by a token that ends nothing": ((97,), FinishReason.STOP),
    "no end with the token that ends": ((END,), None),
    "tokens behind the one that ends": ((97, END, 98), None),
    "no end at the full length": ((97,) * (LENGTH - 1), None),
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_cannot_be_true_is_not_passed_on_and_another_pair_goes_on(cluster: Any, lie: str) -> None:
    tokens, finish = LIES[lie]
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH)
    await cluster.until(lambda: decode.offsets == [1])
    await cluster.add_pair("1")
    decode.say(1, *tokens, finish=finish)
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    await cluster.until(lambda: decode.idle)
    (request,) = cluster.recorded.requests
    culprit, failure = request.args("TryFailed")
    assert (culprit, type(failure)) == (decode.info, InvalidOutput)


@pytest.mark.parametrize("lie", ["another token than before", "of a choice that nobody asked for"])
async def test_tokens_that_contradict_what_is_known_are_not_passed_on(cluster: Any, lie: str) -> None:
    _, decode = await cluster.add_pair()
    decode.pause_at(3)
    call = cluster.generate(*PROMPT, max_tokens=LENGTH)
    await cluster.until(lambda: decode.offsets == [3])
    await cluster.add_pair("1")
    before = cluster.completion(PROMPT, 3)
    if lie == "another token than before":
        decode.say(1, before[1], before[2] ^ 1, 97)
    else:
        decode.say(1, 97, index=7)
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    await cluster.until(lambda: decode.idle)


async def test_logprobs_that_were_asked_for_are_not_left_out(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH, logprobs=1)
    await cluster.until(lambda: decode.offsets == [1])
    await cluster.add_pair("1")
    decode.say(1, *cluster.completion(PROMPT, 2)[1:])
    responses = [response async for response in call]
    tokens = [token for response in responses for token in response.token_ids]
    assert tokens == cluster.completion(PROMPT, LENGTH)
    assert [each.token_id for response in responses for each in response.logprobs] == tokens


async def test_where_there_is_no_other_pair_the_caller_is_told_that_it_was_not_the_request(
    launch: Any, policy: Any
) -> None:
    cluster = await launch(policy=policy(max_retries=0))
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH)
    first = await call.read()
    await cluster.until(lambda: decode.offsets == [1])
    decode.say(1, 4_000_000_000)
    error, code, tokens = await cluster.error_of(call)
    assert (type(error), code) == (InvalidOutput, grpc.StatusCode.INTERNAL)
    assert "d0" in error.message
    assert [*first.token_ids, *tokens] == cluster.completion(PROMPT, 1)
