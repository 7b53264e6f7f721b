"""tritonclient from PyPI, as it is, against three real processes. Its stubs and Tandem's live in one process here:
Tandem's foreign protocols have a descriptor pool of their own (tandem/foreign/pool.py).
"""

from __future__ import annotations

import json
import queue
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from bench.support.cluster import Cluster, becomes_idle, eventually
from models.demo.text import make_story
from tandem.client import Client

PROMPT = make_story(random.Random(2), 6).text
GREEDY = {"max_tokens": 40, "temperature": 0.0}
SEEDED = {"max_tokens": 40, "temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 7, "ignore_eos": True}
PATIENCE_S = 30.0


@pytest.fixture
def server(demo_cluster: Cluster, client: Client) -> Iterator[triton.InferenceServerClient]:
    """`client` sees to it that nothing runs afterwards."""
    with triton.InferenceServerClient(demo_cluster.target) as server:
        yield server


def tensor(name: str, values: list[Any], datatype: str, shape: list[int] | None = None) -> triton.InferInput:
    made = triton.InferInput(name, shape or [len(values)], datatype)
    kinds = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64}
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    made.set_data_from_numpy(np.array(encoded, dtype=kinds[datatype]).reshape(made.shape()))
    return made


def inputs(*texts: str, stream: bool | None = None, **sampling: Any) -> list[triton.InferInput]:
    made = [tensor("text_input", list(texts or (PROMPT,)), "BYTES")]
    if stream is not None:
        made.append(tensor("stream", [stream], "BOOL"))
    if sampling:
        made.append(tensor("sampling_parameters", [json.dumps(sampling)], "BYTES"))
    return made


def text_of(result: triton.InferResult) -> str:
    return b"".join(result.as_numpy("text_output").reshape(-1)).decode()


def is_final(result: triton.InferResult) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param


class Responses:
    """What a stream's callback was given, by request id."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self._queue.put((result, error))

    def next(self) -> triton.InferResult:
        result, error = self._queue.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        return result

    def texts(self, count: int) -> dict[str, str]:
        """All text of `count` requests."""
        texts: dict[str, str] = {}
        while count:
            result = self.next()
            request_id = result.get_response().id
            texts[request_id] = texts.get(request_id, "") + text_of(result)
            count -= is_final(result)
        return texts


@pytest.fixture
def responses(server: triton.InferenceServerClient) -> Iterator[Responses]:
    responses = Responses()
    server.start_stream(responses)
    yield responses
    server.stop_stream(cancel_requests=True)


def test_the_server_and_its_model_introduce_themselves(server: triton.InferenceServerClient) -> None:
    assert server.is_server_live()
    assert server.is_server_ready()
    assert [server.is_model_ready(name) for name in ("demo", "other")] == [True, False]
    assert server.get_server_metadata().name == "tandem"
    assert server.get_model_metadata("demo").inputs[0].name == "text_input"
    config = server.get_model_config("demo", as_json=True)["config"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [each["name"] for each in config["input"] if not each.get("optional")] == ["text_input"]
    assert [model.name for model in server.get_model_repository_index().models] == ["demo"]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_text_is_what_inference_service_says(
    server: triton.InferenceServerClient, client: Client, sampling: dict[str, Any]
) -> None:
    expected = client.complete(PROMPT, **sampling).choices[0]

    result = server.infer("demo", inputs(**sampling), request_id="one")

    assert text_of(result) == expected.text
    assert list(result.as_numpy("finish_reason")) == [expected.finish_reason.value.encode()]
    assert result.get_response().id == "one"


def test_a_batch_gives_each_text_its_own_answer(server: triton.InferenceServerClient, client: Client) -> None:
    texts = ["Once upon a time", "There was a", PROMPT]

    result = server.infer("demo", inputs(*texts, **GREEDY))

    answers = [answer.decode() for answer in result.as_numpy("text_output")]
    assert answers == [client.complete(text, **GREEDY).text for text in texts]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model_name": "other"}, "NOT_FOUND", "serves demo"),
        ({"model_version": "2"}, "NOT_FOUND", "version 1 only"),
        ({"inputs": [tensor("text", ["x"], "BYTES")]}, "INVALID_ARGUMENT", "inputs.text_input: is missing"),
        ({"inputs": [*inputs(), tensor("colour", [1], "INT32")]}, "INVALID_ARGUMENT", "colour: no such input"),
        ({"inputs": [tensor("text_input", [1], "INT32")]}, "INVALID_ARGUMENT", "must be BYTES, not INT32"),
        ({"inputs": inputs("x" * 3000)}, "INVALID_ARGUMENT", "leave no room in"),
        ({"inputs": inputs(""), "request_id": "e"}, "INVALID_ARGUMENT", "text: must not be empty"),
        ({"inputs": inputs(top_p=2)}, "INVALID_ARGUMENT", "sampling.top_p"),
        ({"inputs": inputs(n=2)}, "UNIMPLEMENTED", "sampling.n"),
        ({"inputs": inputs(stream=True)}, "INVALID_ARGUMENT", "call ModelStreamInfer"),
        ({"outputs": [triton.InferRequestedOutput("logits")]}, "INVALID_ARGUMENT", "outputs.logits: no such output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_refused_by_name(
    server: triton.InferenceServerClient, changes: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        server.infer(**({"model_name": "demo", "inputs": inputs(max_tokens=4)} | changes))

    assert caught.value.status() == f"StatusCode.{code}"
    assert words in caught.value.message()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_streamed_text_is_what_inference_service_says(
    server: triton.InferenceServerClient, responses: Responses, client: Client, sampling: dict[str, Any]
) -> None:
    long = sampling | {"max_tokens": 400}  # what waits while a process stands still comes in one part
    server.async_stream_infer("demo", inputs(stream=True, **long), request_id="s")

    parts = []
    while not parts or not is_final(parts[-1]):
        parts.append(responses.next())

    assert len(parts) > 1
    assert "".join(text_of(part) for part in parts) == client.complete(PROMPT, **long).text
    assert [part.as_numpy("finish_reason")[0] for part in parts[:-1]] == [b""] * (len(parts) - 1)
    assert parts[-1].as_numpy("finish_reason")[0] in {b"stop", b"length"}


def test_many_requests_share_a_stream(
    server: triton.InferenceServerClient, responses: Responses, client: Client
) -> None:
    seeds = {f"seed {seed}": SEEDED | {"seed": seed} for seed in range(24)}
    for request_id, sampling in seeds.items():
        server.async_stream_infer("demo", inputs(stream=True, **sampling), request_id=request_id)

    texts = responses.texts(len(seeds))

    assert texts == {request_id: client.complete(PROMPT, **sampling).text for request_id, sampling in seeds.items()}


def test_a_cancelled_stream_frees_all_blocks(
    server: triton.InferenceServerClient, client: Client, num_cancelled: Callable[[], int]
) -> None:
    before = num_cancelled()
    responses = Responses()
    server.start_stream(responses)
    for number in range(6):
        server.async_stream_infer("demo", inputs(stream=True, max_tokens=800, ignore_eos=True), request_id=str(number))
    responses.next()
    assert eventually(lambda: client.status().active_requests == 6)

    server.stop_stream(cancel_requests=True)

    assert becomes_idle(client)
    assert num_cancelled() == before + 6


async def test_the_asyncio_client_infers_and_streams(demo_cluster: Cluster, client: Client) -> None:
    expected = client.complete(PROMPT, **GREEDY).text

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for name in ("a", "b"):
            yield {"model_name": "demo", "inputs": inputs(stream=True, **GREEDY), "request_id": name}

    async with triton_aio.InferenceServerClient(demo_cluster.target) as server:
        assert text_of(await server.infer("demo", inputs(**GREEDY))) == expected
        texts = {"a": "", "b": ""}
        async for result, error in server.stream_infer(requests()):
            assert error is None
            texts[result.get_response().id] += text_of(result)
    assert texts == {"a": expected, "b": expected}


def test_statistics_count_what_came_this_way(server: triton.InferenceServerClient) -> None:
    def counts() -> tuple[int, int]:
        (model,) = server.get_inference_statistics("demo").model_stats
        return model.inference_stats.success.count, model.inference_stats.fail.count

    before = counts()
    server.infer("demo", inputs("a", "b", **GREEDY))
    with pytest.raises(InferenceServerException):
        server.infer("demo", inputs(top_p=2))

    assert counts() == (before[0] + 2, before[1] + 1)


def test_every_method_of_the_protocol_is_served_or_refused_with_a_reason(demo_cluster: Cluster, client: Client) -> None:
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    served = {"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig"}
    served |= {"ModelInfer", "ModelStreamInfer", "ModelStatistics", "RepositoryIndex"}

    with grpc.insecure_channel(demo_cluster.target) as channel:
        for method in {each.name for each in service.methods} - served:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{service.full_name}/{method}")(b"", timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert caught.value.details().startswith(f"{method}: ")
