"""Requests for several choices, through a router and fake workers: each choice whole and in order, whatever happens."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from tandem.errors import InvalidRequest
from tandem.foreign import vllm_engine_pb2 as vllm
from tandem.foreign.vllm_engine_pb2_grpc import VllmEngineStub
from tandem.types import FinishReason, Role
from tandem.v1 import inference_pb2 as pb

PROMPT = (72, 105)
LENGTH = 12
N = (1, 2, 5, 16)
END = 256
"""The model's end-of-text token."""


class Choices:
    """What a client saw of one stream."""

    def __init__(self, responses: list[pb.GenerateResponse]) -> None:
        self.responses = responses
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.texts: dict[int, str] = defaultdict(str)
        self.ends: dict[int, pb.GenerateResponse] = {}
        for response in responses:
            assert response.index not in self.ends, "nothing follows a choice's finish reason"
            self.tokens[response.index] += response.token_ids
            self.texts[response.index] += response.text
            if response.finish_reason:
                self.ends[response.index] = response
        assert [each.HasField("usage") for each in responses] == [False] * (len(responses) - 1) + [True]
        assert [each.HasField("timings") for each in responses] == [False] * (len(responses) - 1) + [True]

    @property
    def usage(self) -> pb.Usage:
        return self.responses[-1].usage


async def read(call: Any) -> Choices:
    """To its end; raises as the call does."""
    responses: list[pb.GenerateResponse] = []
    while isinstance(response := await call.read(), pb.GenerateResponse):
        responses.append(response)
    return Choices(responses)


def num_told(cluster: Any, index: int) -> int:
    """Tokens of one choice that the router knows in order."""
    calls = cluster.recorded.requests[0].calls
    return sum(call[1] for call in calls if call[0] == "TokensArrived" and call[2] == index)


def expected(cluster: Any, n: int, length: int = LENGTH) -> dict[int, list[int]]:
    return {index: cluster.completion(PROMPT, length, index) for index in range(n)}


@pytest.mark.parametrize("n", N)
@pytest.mark.parametrize("local", [False, True])
async def test_each_choice_comes_whole_and_in_order(cluster: Any, n: int, local: bool) -> None:
    if local:
        await cluster.add(Role.DECODE, "d", local_prefill_tokens=None)
    else:
        await cluster.add_pair()
    seen = await read(cluster.generate(*PROMPT, n=n, max_tokens=LENGTH))
    assert dict(seen.tokens) == expected(cluster, n)
    assert dict(seen.texts) == {index: bytes(tokens).decode() for index, tokens in seen.tokens.items()}
    assert {each.finish_reason for each in seen.ends.values()} == {pb.FINISH_REASON_LENGTH}
    assert (seen.usage.prompt_tokens, seen.usage.completion_tokens) == (len(PROMPT), n * LENGTH)


async def test_one_group_goes_to_each_worker_and_is_released_once(cluster: Any) -> None:
    prefill, decode = await cluster.add_pair()
    await read(cluster.generate(*PROMPT, n=4, seed=7))
    for worker in (prefill, decode):
        (spec,) = worker.specs
        assert [each.index for each in spec.choices] == [0, 1, 2, 3]
        assert spec.sampling.seed == 7
        await cluster.until(lambda worker=worker: worker.num_releases == 1)


@pytest.mark.parametrize("n", N)
async def test_complete_gives_all_choices_by_index(cluster: Any, n: int) -> None:
    await cluster.add_pair()
    sampling = pb.SamplingParams(n=n, max_tokens=LENGTH, logprobs=1)
    generate = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
    response = await cluster.inference.Complete(pb.CompleteRequest(generate=generate))
    assert [each.index for each in response.choices] == list(range(n))
    assert {each.index: list(each.token_ids) for each in response.choices} == expected(cluster, n)
    assert all([one.token_id for one in each.logprobs] == list(each.token_ids) for each in response.choices)
    assert response.usage.completion_tokens == n * LENGTH


async def test_a_stop_string_ends_its_choice_alone(cluster: Any) -> None:
    await cluster.add_pair()
    text = bytes(cluster.completion(PROMPT, LENGTH, 1)).decode()
    seen = await read(cluster.generate(*PROMPT, n=3, max_tokens=LENGTH, stop=[text[3:6]]))
    assert seen.texts[1] == text[:3]
    assert (seen.ends[1].stop_text, seen.ends[1].finish_reason) == (text[3:6], pb.FINISH_REASON_STOP)
    for index in (0, 2):
        whole = bytes(cluster.completion(PROMPT, LENGTH, index)).decode()
        assert seen.texts[index] == whole.split(text[3:6])[0]


async def test_when_stop_strings_end_all_choices_the_workers_are_released(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    stops = [bytes(cluster.completion(PROMPT, 4, index)[2:4]).decode() for index in range(2)]
    decode.pause_at(6)
    seen = await read(cluster.generate(*PROMPT, n=2, max_tokens=200, stop=stops))
    assert {each.finish_reason for each in seen.ends.values()} == {pb.FINISH_REASON_STOP}
    await cluster.until(lambda: cluster.idle)


@pytest.mark.parametrize("after", [1, 4, 9])
@pytest.mark.parametrize("n", [2, 16])
async def test_a_lost_decode_worker_loses_and_repeats_nothing_of_any_choice(cluster: Any, n: int, after: int) -> None:
    _, decode = await cluster.add_pair()
    decode.pause_at(after)
    call = cluster.generate(*PROMPT, n=n, max_tokens=LENGTH, logprobs=1)
    await cluster.until(lambda: decode.offsets == [after] * n)
    _, other = await cluster.add_pair("1")
    await decode.die()
    seen = await read(call)
    assert dict(seen.tokens) == expected(cluster, n)
    assert seen.usage.completion_tokens == n * LENGTH
    (resumed,) = other.specs
    for choice in resumed.choices:
        assert list(choice.output_token_ids) == expected(cluster, n)[choice.index][: len(choice.output_token_ids)]


@pytest.mark.parametrize("stage", ["reserve", "prefill", "first", "attach"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_worker_lost_before_the_first_tokens_is_replaced(cluster: Any, stage: str, role: Role) -> None:
    workers = prefill, decode = await cluster.add_pair()
    for worker in workers:
        worker.hold(stage, "decode")
    call = cluster.generate(*PROMPT, n=4, max_tokens=LENGTH)
    reached = prefill if stage == "prefill" else decode
    await cluster.until(lambda: not reached.idle)
    await cluster.add_pair("1")
    await (prefill if role is Role.PREFILL else decode).die()
    for worker in workers:
        worker.let_go()
    assert dict((await read(call)).tokens) == expected(cluster, 4)


async def test_a_replay_resumes_only_the_choices_that_are_not_finished(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT, n=3, max_tokens=LENGTH)
    await cluster.until(lambda: decode.offsets == [1, 1, 1])
    tokens = [*cluster.completion(PROMPT, 3, 1), END]
    decode.say(1, *tokens[1:], finish=FinishReason.STOP, index=1)
    await cluster.until(lambda: num_told(cluster, 1) == 4)
    _, other = await cluster.add_pair("1")
    await decode.die()
    seen = await read(call)
    assert dict(seen.tokens) == expected(cluster, 3) | {1: tokens}
    (resumed,) = other.specs
    assert [each.index for each in resumed.choices] == [0, 2]
    assert [len(each.output_token_ids) for each in resumed.choices] == [1, 1]
    assert seen.usage.completion_tokens == 2 * LENGTH + 4


async def test_the_default_of_max_tokens_lets_the_group_fit_the_pool(cluster: Any) -> None:
    await cluster.add(Role.PREFILL, "p")
    await cluster.add(Role.DECODE, "d", pool_tokens=16 * 10)
    sampling = pb.SamplingParams(n=4)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
    seen = await read(cluster.inference.Generate(request))
    assert [len(tokens) for tokens in seen.tokens.values()] == [2 * 16 - len(PROMPT)] * 4
    error, _, _ = await cluster.error_of(cluster.generate(*PROMPT, n=4, max_tokens=2 * 16 - len(PROMPT) + 1))
    assert isinstance(error, InvalidRequest)
    assert error.field == "sampling.max_tokens"


@pytest.mark.parametrize("stream", [True, False])
async def test_vllm_engine_gives_every_choice_by_its_index(cluster: Any, stream: bool) -> None:
    await cluster.add_pair()
    sampling = vllm.SamplingParams(max_tokens=LENGTH, temperature=0.0, n=3)
    prompt = vllm.TokenizedInput(input_ids=PROMPT)
    request = vllm.GenerateRequest(request_id="a", tokenized=prompt, stream=stream, sampling_params=sampling)
    messages = [each async for each in VllmEngineStub(cluster.channel).Generate(request, timeout=30)]
    finals = [each.complete for each in messages if each.HasField("complete")]
    assert [each.index for each in finals] == [0, 1, 2]
    assert {each.index: list(each.output_ids) for each in finals} == expected(cluster, 3)
    chunks: dict[int, list[int]] = defaultdict(list)
    for each in messages:
        if each.HasField("chunk"):
            chunks[each.chunk.index] += each.chunk.token_ids
    assert dict(chunks) == (expected(cluster, 3) if stream else {})


async def test_an_abort_says_of_each_choice_what_came_of_it(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    sampling = vllm.SamplingParams(max_tokens=LENGTH, temperature=0.0, n=2)
    prompt = vllm.TokenizedInput(input_ids=PROMPT)
    engine = VllmEngineStub(cluster.channel)
    call = engine.Generate(vllm.GenerateRequest(request_id="a", tokenized=prompt, sampling_params=sampling), timeout=30)
    await cluster.until(lambda: decode.offsets == [1, 1])
    decode.say(1, END, finish=FinishReason.STOP, index=1)
    await cluster.until(lambda: num_told(cluster, 1) == 2)
    await asyncio.sleep(0)
    await engine.Abort(vllm.AbortRequest(request_ids=["a"]))
    finals = [each.complete async for each in call]
    assert [(each.index, each.finish_reason) for each in finals] == [(0, "abort"), (1, "stop")]
    await cluster.until(lambda: cluster.idle)
