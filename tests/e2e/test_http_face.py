"""Requests and answers of the HTTP face, over one cluster."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from bench.support.cluster import becomes_idle, serve
from tandem.client import Client
from tests.http_address import http_address
from tests.http_table import CHAT, TABLE, Json


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve("demo", "--http", "127.0.0.1:0", "--http-origins", "https://chat.example") as cluster:
        yield http_address(cluster)
        with Client(cluster.target) as direct:
            assert becomes_idle(direct), direct.status()


def ask(
    address: str, path: str, body: Any, headers: Json | None = None, method: str | None = None
) -> tuple[int, bytes, Any]:
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{address}{path}", data, {"Content-Type": "application/json", **(headers or {})}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


@pytest.mark.parametrize("name", TABLE)
def test_each_request_of_the_table_is_answered_as_it_says(address: str, name: str) -> None:
    row = TABLE[name]
    status, answer, _ = ask(address, row.path, row.body, row.headers)
    assert status == row.status, answer
    if answer:
        assert row.is_right(json.loads(answer)), answer


def events(answer: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "prompt_logprobs": 1},
        {"prompt": ["Once", "There", "All"]},
        {"echo": True, "logprobs": 1, "n": 2},
        {"stop": ["zzz"], "logprobs": 0},
    ],
)
def test_a_streamed_completion_is_the_whole_one_in_pieces(address: str, fields: Json) -> None:
    body = {"prompt": "Once", "max_tokens": 12, "seed": 5, **fields}
    whole = json.loads(ask(address, "/v1/completions", body)[1])
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(ask(address, "/v1/completions", body | usage)[1])
    for choice in whole["choices"]:
        pieces = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [value for each in pieces for value in each["logprobs"][name]] == values
        assert pieces[0].get("prompt_logprobs") == choice.get("prompt_logprobs")
    spent, expected = chunks[-1]["usage"], whole["usage"]
    assert (spent["prompt_tokens"], spent["completion_tokens"]) == (
        expected["prompt_tokens"],
        expected["completion_tokens"],
    )


@pytest.mark.parametrize(
    ("path", "prompt", "num_tokens"),
    [("/v1/chat/completions", {"messages": CHAT}, 6), ("/v1/completions", {"prompt": ["Once", "There"]}, 12)],
)
def test_usage_is_told_on_the_way_if_that_is_asked_for(address: str, path: str, prompt: Json, num_tokens: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, "max_tokens": 6, "temperature": 0, "stream": True, "stream_options": options}
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(ask(address, path, body)[1])]
    assert counts == sorted(counts)
    assert counts[-2:] == [num_tokens] * 2


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b'"a"', b"\xff", b'{"messages": ' + b"[" * 100_000, b"null"])
def test_a_body_that_is_no_request_is_refused(address: str, body: bytes) -> None:
    status, answer, _ = ask(address, "/v1/chat/completions", body)
    assert status == 400
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large_is_refused_unread(address: str) -> None:
    status, answer, _ = ask(address, "/v1/completions", b" " * 20_000_000)
    assert (status, json.loads(answer)["error"]["param"]) == (400, "body")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/completions", {"prompt": ["Once", "There"]}),
        ("/v1/messages", {"messages": CHAT}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_a_callers_id_of_a_request_is_taken_from_its_header(address: str, path: str, body: Json, stream: bool) -> None:
    tokens = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    _, answer, headers = ask(address, path, {**body, tokens: 1, "stream": stream}, {"X-Request-Id": "of-my-own"})
    assert headers["X-Request-Id"] == "of-my-own"
    assert b"_of-my-own" in answer or b"-of-my-own" in answer


def test_the_id_of_a_request_is_in_a_header(address: str) -> None:
    _, answer, headers = ask(address, "/v1/completions", {"prompt": "Once", "max_tokens": 1})
    assert json.loads(answer)["id"] == f"cmpl-{headers['X-Request-Id']}"


def test_pages_of_an_origin_that_was_named_may_call_and_no_others(address: str) -> None:
    asked = {"Access-Control-Request-Method": "POST"}
    status, _, named = ask(address, "/v1/completions", None, {"Origin": "https://chat.example", **asked}, "OPTIONS")
    _, _, other = ask(address, "/v1/completions", None, {"Origin": "https://evil.example", **asked}, "OPTIONS")
    _, _, answered = ask(address, "/v1/models", None, {"Origin": "https://chat.example"})
    assert status == 204
    assert named["Access-Control-Allow-Origin"] == answered["Access-Control-Allow-Origin"] == "https://chat.example"
    assert "Access-Control-Allow-Origin" not in other


def test_requests_are_counted_by_route_and_status(address: str) -> None:
    ask(address, "/version", None)
    ask(address, "/of-my-own-invention", None)
    _, answer, _ = ask(address, "/metrics", None)
    assert re.search(rb'tandem_http_requests_total\{code="200",route="/version"\} [1-9]', answer)
    assert b"of-my-own-invention" not in answer
