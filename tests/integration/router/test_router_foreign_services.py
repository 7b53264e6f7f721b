"""The KServe and vLLM doors of a real router with fake workers: what ends early, what runs side by side."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tandem.foreign import kserve_pb2 as kserve
from tandem.foreign import vllm_engine_pb2 as vllm
from tandem.foreign.kserve_pb2_grpc import GRPCInferenceServiceStub
from tandem.foreign.vllm_engine_pb2_grpc import VllmEngineStub

PROMPT = "Hi"
PROMPT_IDS = (72, 105)
PATIENCE_S = 20.0


def infer(request_id: str, *texts: str, max_tokens: int = 8, stream: bool = True, **parameters: Any) -> Any:
    request = kserve.ModelInferRequest(id=request_id)
    contents = kserve.InferTensorContents(bytes_contents=[text.encode() for text in texts or (PROMPT,)])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts) or 1], contents=contents)
    request.parameters["max_tokens"].int64_param = max_tokens
    request.parameters["stream"].bool_param = stream
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


class Stream:
    """One ModelStreamInfer call, written and read by hand."""

    def __init__(self, cluster: Any) -> None:
        self.call = GRPCInferenceServiceStub(cluster.channel).ModelStreamInfer(timeout=30)

    async def write(self, *requests: Any) -> None:
        for request in requests:
            await self.call.write(request)

    async def read(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self.call.read()

    async def answer(self, request_id: str) -> str:
        """All text of one request, of which alone there are responses."""
        text = ""
        while True:
            message = await self.read()
            assert not message.error_message
            assert message.infer_response.id == request_id
            text += message.infer_response.raw_output_contents[0][4:].decode()
            if message.infer_response.parameters["triton_final_response"].bool_param:
                return text


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def spoken(cluster: Any, length: int = 8, prompt: tuple[int, ...] = PROMPT_IDS) -> str:
    return bytes(cluster.completion(prompt, length)).decode()


@pytest.mark.parametrize("stage", ["reserve", "prefill", "attach", "decode"])
async def test_the_end_of_a_stream_ends_all_its_requests_in_every_stage(cluster: Any, stage: str) -> None:
    workers = await cluster.add_pair()
    for worker in workers:
        worker.hold(stage)
    stream = Stream(cluster)
    await stream.write(infer("a"), infer("b"), infer("c"))
    await cluster.until(lambda: cluster.router.queue.num_active == 3 and not workers[stage != "prefill"].idle)

    stream.call.cancel()

    await cluster.until(lambda: cluster.idle)


async def test_requests_of_one_stream_run_side_by_side(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    stream = Stream(cluster)
    await stream.write(infer("one", "Hi"), infer("two", "Ho"))

    begun = [await stream.read(), await stream.read()]
    decode.let_go()
    texts = {message.infer_response.id: message.infer_response.raw_output_contents[0][4:] for message in begun}
    assert set(texts) == {"one", "two"}

    num_final = 0
    while num_final < 2:
        response = (await stream.read()).infer_response
        texts[response.id] += response.raw_output_contents[0][4:]
        num_final += response.parameters["triton_final_response"].bool_param
    assert texts["one"].decode() == spoken(cluster)
    assert texts["two"].decode() == spoken(cluster, 8, (72, 111))


async def test_a_failed_request_names_itself_and_the_stream_lives_on(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    stream = Stream(cluster)

    await stream.write(infer("late", timeout=2_000_000))
    first = await stream.read()
    late = await stream.read()
    decode.let_go()
    await stream.write(infer("next"))

    assert first.infer_response.id == "late"
    assert not first.error_message
    assert "deadline passed while decoding" in late.error_message
    assert late.infer_response.id == "late"
    assert late.infer_response.parameters["triton_final_response"].bool_param
    assert await stream.answer("next") == spoken(cluster)


async def test_a_client_that_is_done_sending_still_gets_its_answers(cluster: Any) -> None:
    await cluster.add_pair()
    stream = Stream(cluster)
    await stream.write(infer("a"))
    await stream.call.done_writing()

    assert await stream.answer("a") == spoken(cluster)
    assert await stream.read() is grpc.aio.EOF


async def test_an_idle_stream_holds_up_no_drain(launch: Any) -> None:
    cluster = await launch(drain_grace_s=60.0)
    await cluster.add_pair()
    stream = Stream(cluster)
    await stream.write(infer("a"))
    await stream.answer("a")

    cluster.stop.set()

    async with asyncio.timeout(PATIENCE_S):
        await cluster.serving
    with pytest.raises(grpc.aio.AioRpcError, match="draining") as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_request_that_runs_on_a_stream_is_finished_by_a_drain(launch: Any) -> None:
    cluster = await launch(drain_grace_s=60.0)
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    stream = Stream(cluster)
    await stream.write(infer("a"))
    await stream.read()

    cluster.stop.set()
    await cluster.until(lambda: cluster.router.entrance.draining)
    await stream.call.done_writing()
    decode.let_go()

    assert await stream.answer("a") == spoken(cluster)[1:]
    assert await stream.read() is grpc.aio.EOF


async def test_one_text_that_fails_fails_its_batch_and_frees_the_others(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = GRPCInferenceServiceStub(cluster.channel).ModelInfer(infer("batch", "Hi", "x" * 600, stream=False))

    with pytest.raises(grpc.aio.AioRpcError, match="600 tokens leave no room") as caught:
        await call

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await cluster.until(lambda: cluster.idle)


async def test_a_cancelled_batch_frees_every_text(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = GRPCInferenceServiceStub(cluster.channel).ModelInfer(infer("batch", "Hi", "Ho", "He", stream=False))
    await cluster.until(lambda: decode.offsets == [1, 1, 1])

    call.cancel()

    await cluster.until(lambda: cluster.idle)


def generate(request_id: str, *, stream: bool = True) -> vllm.GenerateRequest:
    sampling = vllm.SamplingParams(max_tokens=8, temperature=0.0)
    prompt = vllm.TokenizedInput(input_ids=PROMPT_IDS)
    return vllm.GenerateRequest(request_id=request_id, tokenized=prompt, stream=stream, sampling_params=sampling)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_aborted_request_says_what_it_has_and_frees_its_workers(cluster: Any, stream: bool) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    engine = VllmEngineStub(cluster.channel)
    aborted, other = (engine.Generate(generate(name, stream=stream), timeout=30) for name in ("bad", "good"))
    await cluster.until(lambda: decode.offsets == [1, 1])

    await engine.Abort(vllm.AbortRequest(request_ids=["bad", "unknown"]))

    messages = [message async for message in aborted]
    assert messages[-1].complete.finish_reason == "abort"
    assert list(messages[-1].complete.output_ids) == cluster.completion(PROMPT_IDS, 1)
    assert len(messages) == (2 if stream else 1)
    await cluster.until(lambda: len(decode.sequences) == 1)
    decode.let_go()
    finished = [message async for message in other][-1].complete
    assert (list(finished.output_ids), finished.finish_reason) == (cluster.completion(PROMPT_IDS, 8), "length")


async def test_ready_says_what_health_says(cluster: Any) -> None:
    service, engine = GRPCInferenceServiceStub(cluster.channel), VllmEngineStub(cluster.channel)
    assert not (await service.ServerReady(kserve.ServerReadyRequest())).ready
    index = (await service.RepositoryIndex(kserve.RepositoryIndexRequest())).models[0]
    assert index.state == "UNAVAILABLE"
    assert "decode" in index.reason
    assert "decode" in (await engine.HealthCheck(vllm.HealthCheckRequest())).message

    await cluster.add_pair()

    assert (await service.ServerReady(kserve.ServerReadyRequest())).ready
    assert (await service.RepositoryIndex(kserve.RepositoryIndexRequest(ready=True))).models[0].state == "READY"
    assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy


async def test_a_message_that_cannot_be_decoded_ends_a_stream_with_an_answer_under_way(cluster: Any) -> None:
    method = "/inference.GRPCInferenceService/ModelStreamInfer"
    refused = kserve.ModelInferRequest(id="refused").SerializeToString()
    for _ in range(10):
        call = cluster.channel.stream_stream(method)(timeout=PATIENCE_S)
        await call.write(refused)
        await call.write(b"\xff" * 8)

        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read_all(call)

        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
