"""Bad input, overload, and workers that do not fit: the right status and field, and nothing lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.tokenization import Tokenization
from tandem.errors import CheckpointError, HandshakeMismatch, ModelNotFound, Overloaded
from tandem.rpc.received_error import error_from_rpc
from tandem.types import Role
from tandem.v1 import inference_pb2 as pb

PROMPT = (72, 105)


async def test_a_model_is_found_by_each_of_its_names(launch: Any) -> None:
    cluster = await launch(served_model_names=("big", "small"))
    await cluster.add_pair()
    for name in ("", "big", "small"):
        request = pb.GenerateRequest(token_ids={"ids": PROMPT}, model=name, sampling={"max_tokens": 8})
        assert await cluster.read_tokens(cluster.inference.Generate(request)) == cluster.completion(PROMPT, 8)
    assert (await cluster.inference.GetModel(pb.GetModelRequest())).model == "big"


async def test_another_model_is_not_found(cluster: Any) -> None:
    call = cluster.inference.Generate(pb.GenerateRequest(text="hi", model="other"))
    error, code, _ = await cluster.error_of(call)
    assert code is grpc.StatusCode.NOT_FOUND
    assert isinstance(error, ModelNotFound)


async def test_text_that_is_not_utf8_is_refused_by_field_and_the_router_lives_on(cluster: Any) -> None:
    await cluster.add_pair()
    raw = pb.GenerateRequest(text="AB").SerializeToString().replace(b"AB", b"\xff\xfe")
    method = cluster.channel.unary_stream("/tandem.v1.InferenceService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(raw).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_from_rpc(caught.value).field == "text"
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)


async def test_an_oversize_message_is_refused_and_the_router_lives_on(launch: Any) -> None:
    cluster = await launch()
    await cluster.add_pair()
    call = cluster.inference.Generate(pb.GenerateRequest(text="x" * 9 * 1024 * 1024))
    _, code, _ = await cluster.error_of(call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\ufffd", "\u200d👩‍👩‍👧", "<eos>"])
async def test_odd_text_is_just_text(cluster: Any, text: str) -> None:
    await cluster.add_pair()
    tokenized = await cluster.inference.Tokenize(pb.TokenizeRequest(text=text))
    request = pb.GenerateRequest(text=text, sampling=pb.SamplingParams(max_tokens=4))
    tokens = await cluster.read_tokens(cluster.inference.Generate(request))
    assert tokens == cluster.completion(tokenized.token_ids, 4)
    back = pb.DetokenizeRequest(token_ids=tokenized.token_ids, skip_special_tokens=False)
    assert (await cluster.inference.Detokenize(back)).text == text


async def test_detokenize_refuses_ids_beyond_the_vocabulary(cluster: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.inference.Detokenize(pb.DetokenizeRequest(token_ids=[260]))
    assert error_from_rpc(caught.value).field == "token_ids"


async def test_a_full_queue_sheds_with_a_time_to_come_back(launch: Any) -> None:
    cluster = await launch(max_active_requests=1, max_queued_requests=1)
    prefill, decode = await cluster.add_pair()
    decode.hold("decode")
    running, waiting = cluster.generate(1), cluster.generate(2)
    await cluster.until(lambda: cluster.router.queue.num_queued == 1)
    error, code, _ = await cluster.error_of(cluster.generate(3))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0
    decode.let_go()
    assert await cluster.read_tokens(running) == cluster.completion((1,), 8)
    assert await cluster.read_tokens(waiting) == cluster.completion((2,), 8)
    await cluster.until(lambda: prefill.num_releases == decode.num_releases == 2)


async def test_requests_whose_prompts_are_being_read_take_up_room(launch: Any) -> None:
    cluster = await launch(max_active_requests=1, max_queued_requests=0)
    await cluster.add_pair()
    with cluster.router.entrance.reading(priority=0):
        error, code, _ = await cluster.error_of(cluster.generate(*PROMPT))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error, Overloaded)
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)


async def test_without_workers_the_status_says_what_is_missing(cluster: Any) -> None:
    error, code, _ = await cluster.error_of(cluster.generate(*PROMPT))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert (
        error.message
        == "no decode worker can take it: none is registered; start one with --router and the address of this router"
    )


@pytest.mark.parametrize("field", ["model_fingerprint", "layout_fingerprint"])
async def test_a_pair_that_differs_is_not_used_and_the_field_is_named(cluster: Any, field: str) -> None:
    await cluster.add(Role.PREFILL, "p")
    await cluster.add(Role.DECODE, "d", **{field: "other"})
    error, code, _ = await cluster.error_of(cluster.generate(*PROMPT))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert field in error.message


@pytest.mark.parametrize("field", ["model", "config_fingerprint"])
async def test_a_worker_of_another_model_is_refused_by_field(cluster: Any, field: str) -> None:
    call = cluster.register(cluster.worker_info(Role.DECODE, "d", address="127.0.0.1:1", **{field: "other"}))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    error = error_from_rpc(caught.value)
    assert isinstance(error, HandshakeMismatch)
    assert error.field == field
    assert not cluster.router.workers.views()


@pytest.mark.parametrize("field", ["worker_id", "incarnation", "address", "layout_fingerprint"])
async def test_a_worker_that_leaves_out_a_field_is_refused_by_it(cluster: Any, field: str) -> None:
    info = cluster.worker_info(Role.DECODE, "d", **({"address": "127.0.0.1:1"} | {field: ""}))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.register(info).read()
    assert error_from_rpc(caught.value).field == f"info.{field}"


async def test_a_tokenizer_that_changes_before_the_router_has_read_it_is_refused(
    launch: Any, byte_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(byte_checkpoint, tmp_path / "model")
    load = Tokenization.load

    def replace_first(*given: Any) -> Tokenization:
        shutil.copy(folder / "tokenizer.json", folder / "new")
        (folder / "new").rename(folder / "tokenizer.json")
        return load(*given)

    monkeypatch.setattr(Tokenization, "load", replace_first)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: changed while"):
        await launch(model=str(folder))
