"""The stubs of smg-grpc-proto from PyPI, as they are, against three real processes: vLLM's gRPC engine protocol."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as engine
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

from bench.support.cluster import Cluster, becomes_idle, eventually
from models.demo.text import make_story
from models.files.checkpoint import resolve_model
from tandem.client import Client

PROMPT = make_story(random.Random(3), 6).text
GREEDY = {"max_tokens": 40, "temperature": 0.0}
SEEDED = {"max_tokens": 40, "temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 7, "ignore_eos": True}
ENDLESS = {"max_tokens": 800, "ignore_eos": True}
PATIENCE_S = 30.0


@pytest.fixture
def stub(demo_cluster: Cluster, client: Client) -> Iterator[Any]:
    """`client` sees to it that nothing runs afterwards."""
    with grpc.insecure_channel(demo_cluster.target) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def request(text: str = PROMPT, *, stream: bool = True, request_id: str = "", **sampling: Any) -> Any:
    params = engine.SamplingParams(**sampling)
    return engine.GenerateRequest(request_id=request_id, text=text, stream=stream, sampling_params=params)


def answer(stub: Any, asked: Any) -> tuple[list[int], Any]:
    """The chunks' tokens, and the last message."""
    messages = list(stub.Generate(asked, timeout=PATIENCE_S))
    assert [message.WhichOneof("response") for message in messages] == ["chunk"] * (len(messages) - 1) + ["complete"]
    return [token for message in messages[:-1] for token in message.chunk.token_ids], messages[-1].complete


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_streamed_tokens_are_those_of_inference_service(stub: Any, client: Client, sampling: dict[str, Any]) -> None:
    expected = client.complete(PROMPT, **sampling)

    token_ids, complete = answer(stub, request(**sampling))

    assert tuple(token_ids) == tuple(complete.output_ids) == expected.choices[0].token_ids
    assert complete.finish_reason == expected.choices[0].finish_reason.value
    assert (complete.prompt_tokens, complete.completion_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert client.detokenize(token_ids) == expected.text


def test_a_stop_string_or_token_is_reported(stub: Any, client: Client) -> None:
    whole = client.complete(PROMPT, **GREEDY)
    word, token_id = whole.text.split()[2], whole.choices[0].token_ids[3]

    _, by_word = answer(stub, request(stop=[word], **GREEDY))
    _, by_token = answer(stub, request(stop_token_ids=[token_id], **GREEDY))

    assert (by_word.finish_reason, by_word.matched_stop_str) == ("stop", word)
    assert tuple(by_word.output_ids) == client.complete(PROMPT, stop=[word], **GREEDY).choices[0].token_ids
    assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", token_id)


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_are_those_of_inference_service(stub: Any, client: Client, stream: bool) -> None:
    expected = client.complete(PROMPT, logprobs=2, **GREEDY).choices[0].logprobs

    *chunks, last = stub.Generate(request(stream=stream, logprobs=2, **GREEDY), timeout=PATIENCE_S)

    told = [message.chunk.output_logprobs for message in chunks] + [last.complete.output_logprobs]
    logprobs = [value for each in told for value in each.token_logprobs]
    tops = [list(top.token_ids) for each in told for top in each.top_logprobs]
    assert [token_id for each in told for token_id in each.token_ids] == [each.token_id for each in expected]
    assert logprobs == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert tops == [[key for key, _ in each.top] for each in expected]


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (engine.GenerateRequest(), "INVALID_ARGUMENT", "input: one of tokenized and text"),
        (engine.GenerateRequest(tokenized=engine.TokenizedInput()), "INVALID_ARGUMENT", "prompt: must not be empty"),
        (request("x" * 3000), "INVALID_ARGUMENT", "leave no room in"),
        (request(top_p=2.0), "INVALID_ARGUMENT", "sampling.top_p"),
        (request(logprobs=-1), "INVALID_ARGUMENT", "sampling_params.logprobs"),
        (request(logit_bias={-1: 1.0}), "INVALID_ARGUMENT", "sampling_params.logit_bias"),
        (request(n=17), "INVALID_ARGUMENT", "sampling.n"),
        (request(prompt_logprobs=-1), "INVALID_ARGUMENT", "sampling_params.prompt_logprobs"),
        (request(truncate_prompt_tokens=5), "UNIMPLEMENTED", "sampling_params.truncate_prompt_tokens"),
        (engine.GenerateRequest(text="x", data_parallel_rank=1), "INVALID_ARGUMENT", "no rank 1"),
        (engine.GenerateRequest(text="x", kv_transfer_params_json="{}"), "UNIMPLEMENTED", "kv_transfer_params_json"),
        (
            engine.GenerateRequest(text="x", mm_inputs=engine.MultimodalInputs(mm_hashes=["a"])),
            "UNIMPLEMENTED",
            "mm_inputs",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_refused_by_name(stub: Any, asked: Any, code: str, words: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        answer(stub, asked)

    assert caught.value.code() is grpc.StatusCode[code]
    assert words in caught.value.details()


def test_a_cancelled_call_frees_all_blocks(stub: Any, client: Client, num_cancelled: Callable[[], int]) -> None:
    before = num_cancelled()
    calls = [stub.Generate(request(n=8, **ENDLESS)) for _ in range(4)]  # of many tokens: some seconds of work
    for call in calls:
        next(call)
        call.cancel()

    assert becomes_idle(client)
    assert num_cancelled() == before + 4


def test_the_tokenizer_comes_as_an_archive_with_its_fingerprint(stub: Any, client: Client, tmp_path: Path) -> None:
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))

    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tuple(tokenizer.encode(PROMPT).ids) == client.tokenize(PROMPT).token_ids


def test_the_model_introduces_itself(stub: Any, client: Client) -> None:
    config = json.loads((resolve_model("demo") / "config.json").read_text())

    info = stub.GetModelInfo(engine.GetModelInfoRequest())

    assert (info.served_model_name, info.model_type, info.is_generation) == ("demo", config["model_type"], True)
    assert (info.vocab_size, info.max_context_length) == (config["vocab_size"], config["max_position_embeddings"])
    assert list(info.architectures) == config["architectures"]
    assert list(info.eos_token_ids) == [config["eos_token_id"]]
    assert str(resolve_model("demo")) not in str(info)


def test_the_server_is_healthy_and_says_how_it_stands(stub: Any) -> None:
    assert stub.HealthCheck(engine.HealthCheckRequest()).healthy
    info = stub.GetServerInfo(engine.GetServerInfoRequest())
    assert (info.server_type, info.data_parallel_size, info.block_size) == ("vllm-grpc", 1, 16)
    assert info.uptime_seconds > 0
    assert not info.is_paused


@contextlib.contextmanager
def one_at_a_time(stub: Any) -> Iterator[None]:
    """A request runs, and the next one when it has ended, until the context is left."""
    left = threading.Event()

    def run() -> None:
        while not left.is_set():
            answer(stub, request(max_tokens=200, ignore_eos=True))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield
        finally:
            left.set()
    running.result()


def test_loads_follow_what_runs(stub: Any, client: Client) -> None:
    def load() -> Any:
        (only,) = stub.GetLoads(engine.GetLoadsRequest(dp_rank=0)).loads
        return only

    def one_runs() -> bool:
        now = load()
        return now.num_running_reqs == now.num_total_reqs == 1 and 0 < now.token_usage < 1

    assert becomes_idle(client)  # by newer heartbeats, which tell of used tokens, too
    assert (load().num_running_reqs, load().num_used_tokens) == (0, 0)
    with one_at_a_time(stub):
        assert eventually(one_runs)
    assert becomes_idle(client)
    with pytest.raises(grpc.RpcError, match="no rank 3"):
        stub.GetLoads(engine.GetLoadsRequest(dp_rank=3))


@pytest.mark.parametrize("method", ["Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"])
def test_what_tandem_does_not_have_is_refused_with_a_reason(stub: Any, method: str) -> None:
    descriptor = engine.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name[method]
    messages = engine if hasattr(engine, descriptor.input_type.name) else common_pb2

    def call() -> None:
        answered = getattr(stub, method)(getattr(messages, descriptor.input_type.name)())
        list(answered)  # a stream tells its status when it is read

    with pytest.raises(grpc.RpcError) as caught:
        call()

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details().startswith(f"{method}: ")
