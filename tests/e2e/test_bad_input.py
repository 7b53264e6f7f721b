"""Each wrong request: the right status and field, nothing lost, and the next request is served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from bench.support.cluster import Cluster
from tandem.client import Client
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def the_next_request_is_served(client: Client) -> Iterator[None]:
    yield
    assert client.complete("Once", max_tokens=3, temperature=0.0, ignore_eos=True).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ({"prompt": ""}, {}, "text"),
        ({"token_ids": ()}, {}, "prompt"),
        ({"token_ids": (5, 5000)}, {}, "token_ids"),
        ({"token_ids": (4_294_967_295,)}, {}, "token_ids"),
        ({"token_ids": (5,) * 1024}, {}, "prompt"),
        ({"token_ids": (5,) * 1000}, {"max_tokens": 25}, "max_tokens"),
        ({"token_ids": (5,)}, {"max_tokens": 4_294_967_295}, "max_tokens"),
        ({"token_ids": (5,)}, {"max_tokens": 0}, "max_tokens"),
        ({"token_ids": (5,)}, {"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"token_ids": (5,)}, {"temperature": -0.1}, "temperature"),
        ({"token_ids": (5,)}, {"temperature": NAN}, "temperature"),
        ({"token_ids": (5,)}, {"temperature": INF}, "temperature"),
        ({"token_ids": (5,)}, {"top_p": 0.0}, "top_p"),
        ({"token_ids": (5,)}, {"top_p": 1.5}, "top_p"),
        ({"token_ids": (5,)}, {"top_p": NAN}, "top_p"),
        ({"token_ids": (5,)}, {"min_p": -0.5}, "min_p"),
        ({"token_ids": (5,)}, {"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"token_ids": (5,)}, {"presence_penalty": 3.0}, "presence_penalty"),
        ({"token_ids": (5,)}, {"frequency_penalty": NAN}, "frequency_penalty"),
        ({"token_ids": (5,)}, {"logprobs": 1000}, "logprobs"),
        ({"token_ids": (5,)}, {"prompt_logprobs": 4_294_967_295}, "prompt_logprobs"),
        ({"token_ids": (5,)}, {"logprobs": 4_294_967_295}, "logprobs"),
        ({"token_ids": (5,)}, {"min_p": NAN}, "min_p"),
        ({"token_ids": (5,)}, {"repetition_penalty": INF}, "repetition_penalty"),
        ({"token_ids": (5,)}, {"repetition_penalty": 1e-30}, "repetition_penalty"),
        ({"token_ids": (5,)}, {"presence_penalty": -INF}, "presence_penalty"),
        ({"token_ids": (5,)}, {"logit_bias": {5: NAN}}, "logit_bias"),
        ({"token_ids": (5,)}, {"logit_bias": {5: -INF}}, "logit_bias"),
        ({"token_ids": (5,)}, {"logit_bias": dict.fromkeys(range(100_000), 1.0)}, "logit_bias"),
        ({"token_ids": (5,)}, {"logit_bias": {4_294_967_295: 1.0}}, "logit_bias"),
        ({"token_ids": (5,)}, {"logit_bias": {5: 1000.0}}, "logit_bias"),
        ({"token_ids": (5,)}, {"logit_bias": {100_000: 1.0}}, "logit_bias"),
        ({"token_ids": (5,)}, {"stop": [""]}, "stop"),
        ({"token_ids": (5,)}, {"stop": ["x"] * 1000}, "stop"),
        ({"token_ids": (5,)}, {"stop": [str(each) for each in range(10_000)]}, "stop"),
        ({"token_ids": (5,)}, {"stop": ["x" * 1_000_000]}, "stop"),
        ({"token_ids": (5,)}, {"stop": ["\N{GRINNING FACE}" * 257]}, "stop"),
        ({"token_ids": (5,)}, {"stop_token_ids": [100_000]}, "stop_token_ids"),
        ({"token_ids": (5,)}, {"stop_token_ids": [5] * 100_000}, "stop_token_ids"),
        ({"token_ids": (5,)}, {"n": 0}, "n"),
        ({"token_ids": (5,)}, {"n": 4_294_967_295}, "n"),
        ({"token_ids": (5,), "cache_salt": "x" * 257}, {}, "cache_salt"),
        ({"token_ids": (5,), "cache_salt": "\N{GRINNING FACE}" * 65}, {}, "cache_salt"),
        ({"token_ids": (5,)}, {"n": 3, "beam_width": 2}, "n"),
        ({"token_ids": (5,)}, {"beam_width": 0}, "beam_width"),
        ({"token_ids": (5,)}, {"beam_width": 17}, "beam_width"),
        ({"token_ids": (5,)}, {"beam_width": 2, "length_penalty": NAN}, "length_penalty"),
        ({"token_ids": (5,)}, {"beam_width": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"messages": []}, {}, "chat"),
        ({"token_ids": (5,), "request_id": "x" * 100_000}, {}, "request_id"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    client: Client, prompt: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.complete(**prompt, **options)

    assert field in refused.value.field


def _call(cluster: Cluster, payload: bytes) -> grpc.RpcError:
    """Sends raw bytes to Generate; the error that comes back."""
    with grpc.insecure_channel(cluster.target) as channel:
        call = channel.unary_stream(
            "/tandem.v1.InferenceService/Generate",
            request_serializer=lambda raw: raw,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as refused:
            list(call(payload, timeout=30))
        return refused.value


def test_invalid_utf8_and_garbage_are_refused_before_any_work(demo_cluster: Cluster) -> None:
    text_field = bytes([3 << 3 | 2, 2, 0xC3, 0x28])

    for payload in (text_field, b"\xff" * 64):
        assert _call(demo_cluster, payload).code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)


def test_a_missing_prompt_is_refused(demo_cluster: Cluster) -> None:
    error = _call(demo_cluster, inference_pb2.GenerateRequest(model="demo").SerializeToString())

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt" in error.details()


@pytest.mark.parametrize(
    "salt", ["\0", "a\0b", "\N{GRINNING FACE}" * 64, "\u202e\u2028\ufeff", "\x7f\x1b[2J", "\U0010ffff", "e\u0301"]
)
def test_any_text_is_a_salt_and_changes_no_token(client: Client, salt: str) -> None:
    options: Any = {"token_ids": (5, 6, 7) * 20, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}

    assert client.complete(**options, cache_salt=salt).choices == client.complete(**options).choices


def test_every_list_at_its_cap_is_served_and_what_only_reports_changes_no_token(client: Client) -> None:
    model = client.model()
    some = [token_id for token_id in range(model.vocab_size) if token_id not in model.eos_token_ids]
    caps: Any = {
        "n": 16,
        "top_k": 4_294_967_295,
        "seed": 2**64 - 1,
        "logprobs": model.max_logprobs,
        "prompt_logprobs": model.max_logprobs,
        "stop": ["\N{SNOWMAN}" * 340 + str(each) for each in range(10, 10 + model.max_stop_strings)],
    }
    plain: Any = {
        "max_tokens": 6,
        "min_tokens": 6,
        "temperature": 0.0,
        "ignore_eos": True,
        "stop_token_ids": some[:256],
        "logit_bias": dict.fromkeys(some[-model.max_logit_bias :], 1.0),
    }
    text = "Once upon a time " * 20

    done = client.complete(text, **plain, **caps)

    assert {each.token_ids for each in done.choices} == {client.complete(text, **plain).choices[0].token_ids}
    assert [len(each.logprobs) for each in done.choices] == [6] * 16
    assert len(done.prompt_logprobs) == done.usage.prompt_tokens - 1


def test_other_requests_are_not_disturbed_by_what_is_refused(client: Client) -> None:
    options: Any = {"token_ids": (5, 6, 7), "max_tokens": 200, "temperature": 0.9, "seed": 4, "ignore_eos": True}
    bad: list[Any] = [
        {"n": 4_294_967_295},
        {"stop": [str(each) for each in range(10_000)]},
        {"logit_bias": dict.fromkeys(range(100_000), NAN)},
        {"temperature": NAN},
        {"cache_salt": "\0" * 100_000},
        {"prompt_logprobs": 4_294_967_295},
    ]
    undisturbed = client.complete(**options).choices[0].token_ids
    tokens: list[int] = []

    for number, update in enumerate(client.generate(**options)):
        tokens += update.token_ids
        if number < 3 * len(bad):
            with pytest.raises(InvalidRequest):
                client.complete("Once", **bad[number % len(bad)])

    assert tuple(tokens) == undisturbed
