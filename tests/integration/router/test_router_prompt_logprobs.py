"""Log-probabilities of a prompt, through a router and fake workers: whole, in order, once, before the first token."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.types import Role
from tandem.v1 import inference_pb2 as pb

PROMPT = (72, 105, 33, 10, 65, 66)
EXPECTED = [(each, -0.25 * each) for each in PROMPT[1:]]
LENGTH = 12


def told(responses: list[pb.GenerateResponse]) -> list[tuple[int, float]]:
    return [(each.token_id, each.logprob) for response in responses for each in response.prompt_logprobs]


async def read(cluster: Any, **sampling: Any) -> list[pb.GenerateResponse]:
    return [response async for response in cluster.generate(*PROMPT, prompt_logprobs=0, **sampling)]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("local", [False, True])
async def test_they_come_once_for_all_choices_before_the_first_token(cluster: Any, n: int, local: bool) -> None:
    if local:
        await cluster.add(Role.DECODE, "d", local_prefill_tokens=None)
    else:
        await cluster.add_pair()

    responses = await read(cluster, n=n)

    assert told(responses) == EXPECTED
    last_told = max(number for number, each in enumerate(responses) if each.prompt_logprobs)
    assert all(not each.token_ids for each in responses[: last_told + 1])
    assert sum(len(each.token_ids) for each in responses) == 8 * n


async def test_they_are_in_the_whole_answer(cluster: Any) -> None:
    await cluster.add_pair()
    sampling = pb.SamplingParams(prompt_logprobs=0, max_tokens=3, n=2)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)

    response = await cluster.inference.Complete(pb.CompleteRequest(generate=request))

    assert [(each.token_id, each.logprob) for each in response.prompt_logprobs] == EXPECTED
    assert [len(each.token_ids) for each in response.choices] == [3, 3]


async def test_a_prompt_of_one_token_has_none(cluster: Any) -> None:
    await cluster.add_pair()
    responses = [response async for response in cluster.generate(72, prompt_logprobs=2)]
    assert told(responses) == []
    assert sum(len(each.token_ids) for each in responses) == 8


@pytest.mark.parametrize("stage", ["first", "attach", "decode"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_worker_that_is_lost_costs_none_and_repeats_none(cluster: Any, stage: str, role: Role) -> None:
    prefill, decode = await cluster.add_pair()
    for worker in (prefill, decode):
        worker.hold(stage, "decode")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH, prompt_logprobs=0)
    await cluster.until(lambda: not decode.idle)
    _, other = await cluster.add_pair("1")
    await (prefill if role is Role.PREFILL else decode).die()
    for worker in (prefill, decode):
        worker.let_go()

    responses = [response async for response in call]

    assert told(responses) == EXPECTED
    assert [token for each in responses for token in each.token_ids] == cluster.completion(PROMPT, LENGTH)
    resumed = [spec for spec in other.specs if spec.choices[0].output_token_ids]
    assert all(spec.sampling.prompt_logprobs is None for spec in resumed)


LIES: dict[str, tuple[int, tuple[int, ...]]] = {
    "of other tokens": (1, (105, 34)),
    "with a gap": (2, (33, 10)),
    "of the first token": (0, (72, 105)),
    "of more tokens than there are": (1, (*PROMPT[1:], 7)),
    "of none": (1, ()),
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_cannot_be_true_is_not_passed_on(cluster: Any, lie: str) -> None:
    offset, token_ids = LIES[lie]
    prefill, _ = await cluster.add_pair()
    prefill.hold("first")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH, prompt_logprobs=0)
    await cluster.until(lambda: not prefill.idle)
    await cluster.add_pair("1")
    prefill.say_prompt_logprobs(offset, *token_ids)

    responses = [response async for response in call]

    assert told(responses) == EXPECTED
    assert [token for each in responses for token in each.token_ids] == cluster.completion(PROMPT, LENGTH)


async def test_a_first_token_before_all_of_them_is_not_passed_on(cluster: Any) -> None:
    prefill, _ = await cluster.add_pair()
    prefill.hold("first")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH, prompt_logprobs=0)
    await cluster.until(lambda: not prefill.idle)
    await cluster.add_pair("1")
    prefill.say_prompt_logprobs(1, *PROMPT[1:3])
    prefill.say(0, 97)

    responses = [response async for response in call]

    assert told(responses) == EXPECTED
    assert [token for each in responses for token in each.token_ids] == cluster.completion(PROMPT, LENGTH)
