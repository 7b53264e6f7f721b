"""How many tokens of a prompt were found in a worker's cache, as clients of each face are told."""

from __future__ import annotations

import struct
from typing import Any

import grpc
import pytest

from tandem.errors import InvalidOutput
from tandem.foreign import kserve_pb2 as kserve
from tandem.foreign import vllm_engine_pb2 as vllm
from tandem.foreign.kserve_pb2_grpc import GRPCInferenceServiceStub
from tandem.foreign.vllm_engine_pb2_grpc import VllmEngineStub
from tandem.types import Role

PROMPT = tuple(range(65, 75))


async def cached_tokens_of(call: Any) -> int:
    responses = [response async for response in call]
    assert all(not response.HasField("usage") for response in responses[:-1])
    return int(responses[-1].usage.cached_tokens)


async def test_the_usage_tells_what_the_worker_found(cluster: Any) -> None:
    prefill, _ = await cluster.add_pair()
    prefill.cached_tokens = 8
    assert await cached_tokens_of(cluster.generate(*PROMPT)) == 8
    prefill.cached_tokens = 0
    assert await cached_tokens_of(cluster.generate(*PROMPT, n=2)) == 0


async def test_of_replays_the_first_try_counts(cluster: Any) -> None:
    prefill, decode = await cluster.add_pair()
    prefill.cached_tokens = 4
    decode.pause_at(3)
    call = cluster.generate(*PROMPT)
    await cluster.until(lambda: decode.offsets == [3])
    second, _ = await cluster.add_pair("1")
    second.cached_tokens = prefill.cached_tokens = 10
    await decode.die()
    assert await cached_tokens_of(call) == 4


async def test_more_than_the_prompt_is_not_believed(cluster: Any) -> None:
    prefill, _ = await cluster.add_pair()
    prefill.cached_tokens = len(PROMPT) + 1
    honest = await cluster.add(Role.PREFILL, "honest")
    assert await cached_tokens_of(cluster.generate(*PROMPT)) == 0
    assert await cached_tokens_of(cluster.generate(*PROMPT)) == 0
    assert honest.specs
    await honest.die()
    error, code, _ = await cluster.error_of(cluster.generate(*PROMPT))
    assert isinstance(error, InvalidOutput)
    assert code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_engine_tells_it_in_every_message(cluster: Any, stream: bool) -> None:
    prefill, _ = await cluster.add_pair()
    prefill.cached_tokens = 8
    request = vllm.GenerateRequest(
        request_id="r",
        tokenized=vllm.TokenizedInput(input_ids=PROMPT),
        sampling_params=vllm.SamplingParams(max_tokens=3),
        stream=stream,
    )
    answers = [answer async for answer in VllmEngineStub(cluster.channel).Generate(request)]
    told = [getattr(answer, answer.WhichOneof("response")).cached_tokens for answer in answers]
    assert told == [8] * len(told)


async def test_kserve_tells_it_where_it_is_asked_for(cluster: Any) -> None:
    prefill, _ = await cluster.add_pair()
    prefill.cached_tokens = 1
    request = kserve.ModelInferRequest()
    contents = kserve.InferTensorContents(bytes_contents=[b"Hi"])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1], contents=contents)
    request.parameters["max_tokens"].int64_param = 3
    request.parameters["return_num_cached_tokens"].bool_param = True
    response = await GRPCInferenceServiceStub(cluster.channel).ModelInfer(request)
    at = [output.name for output in response.outputs].index("num_cached_tokens")
    assert response.outputs[at].datatype == "UINT32"
    assert struct.unpack("<I", response.raw_output_contents[at]) == (1,)
