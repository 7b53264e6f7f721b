"""OpenAI's and Anthropic's own clients, unmodified, over `tandem serve --http`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from bench.support.cluster import Cluster, becomes_idle, eventually, serve
from bench.support.processes import children
from tandem.client import Client
from tests.at_rest import nothing_runs

README = (Path(__file__).parents[2] / "README.md").read_text()
CHAT = [{"role": "user", "content": "Tell me a story."}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
GREEDY_MESSAGES: dict[str, Any] = {"model": "demo", "extra_body": {"temperature": 0}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with serve("demo", "--prefill", "1", "--decode", "1", "--http", "127.0.0.1:0") as cluster:
        yield cluster
        with Client(cluster.target) as direct:
            assert becomes_idle(direct), direct.status()


@pytest.fixture(scope="module")
def base_url(cluster: Cluster) -> str:
    return f"http://{door_of(cluster)}"


def door_of(cluster: Cluster) -> str:
    """The address that its log names, in either format."""

    def told() -> list[str]:
        return re.findall(r'child[=": ]+http\W+address[=": ]+([\d.:]+)', "\n".join(cluster.log))

    assert eventually(told)
    return told()[0]


@pytest.fixture
def client(base_url: str, cluster: Cluster) -> Iterator[openai.OpenAI]:
    """Afterwards no request may be under way."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    with Client(cluster.target) as direct:
        assert nothing_runs(direct), direct.status()


@pytest.fixture
def messages(base_url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client.messages


def test_a_completion_is_tandems_own(client: openai.OpenAI, cluster: Cluster) -> None:
    prompt = "Once upon a time"
    answer = client.completions.create(prompt=prompt, max_tokens=24, **GREEDY)
    with Client(cluster.target) as direct:
        expected = direct.complete(prompt, max_tokens=24, temperature=0.0)
    assert answer.choices[0].text == expected.choices[0].text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CHAT, max_tokens=200, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=CHAT, max_tokens=200, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 4


def test_several_choices_log_probabilities_and_stop_strings(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=8, n=3, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content or [])
    stopped = client.completions.create(prompt="Once upon a time", max_tokens=30, stop=["small"], **GREEDY)
    assert stopped.choices[0].finish_reason == "stop"
    assert "small" not in stopped.choices[0].text


def test_json_by_schema(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "where", "schema": CITY, "strict": True}}
    answer = client.chat.completions.create(messages=CHAT, max_tokens=200, response_format=schema, **GREEDY)
    assert json.loads(answer.choices[0].message.content or "")["city"] in {"Paris", "Rome"}


def test_a_required_tool_is_called(client: openai.OpenAI, messages: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
    answer = client.chat.completions.create(
        messages=CHAT, max_tokens=800, tools=[tool], tool_choice="required", **GREEDY
    )
    assert answer.choices[0].message.tool_calls, answer.choices[0].message.content
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}
    tools = [{"name": "weather", "description": "of a city", "input_schema": CITY}]
    said = messages.create(messages=CHAT, max_tokens=800, tools=tools, tool_choice={"type": "any"}, **GREEDY_MESSAGES)
    (used,) = [block for block in said.content if block.type == "tool_use"]
    assert used.name == "weather"


def test_anthropics_messages(messages: Any, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CHAT, max_tokens=16, **GREEDY).choices[0].message.content
    assert messages.create(messages=CHAT, max_tokens=16, **GREEDY_MESSAGES).content[0].text == whole
    with messages.stream(messages=CHAT, max_tokens=16, **GREEDY_MESSAGES) as stream:
        assert "".join(stream.text_stream) == whole


def test_openais_responses(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CHAT, max_tokens=16, **GREEDY).choices[0].message.content
    asked: dict[str, Any] = {"input": CHAT[0]["content"], "max_output_tokens": 16, **GREEDY}
    assert client.responses.create(**asked).output_text == whole
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole


def test_the_readmes_example_prints_a_story(base_url: str, client: openai.OpenAI) -> None:
    (snippet,) = re.findall(r"^```python openai\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    here = snippet.replace("http://127.0.0.1:8080", base_url)
    done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout) > 20


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [({"model": "nobody"}, openai.NotFoundError), ({"temperature": -1}, openai.BadRequestError)],
)
def test_errors_are_openais(client: openai.OpenAI, wrong: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(messages=CHAT, max_tokens=4, **(GREEDY | wrong))
    assert "message" in caught.value.body  # type: ignore[attr-defined]


def test_a_caller_that_leaves_cancels(client: openai.OpenAI, cluster: Cluster) -> None:
    stream = client.completions.create(prompt="Once", max_tokens=900, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    with Client(cluster.target) as direct:
        assert becomes_idle(direct)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/workers"), ("POST", "/workers"), ("DELETE", "/workers/1"), ("POST", "/flush_cache"), ("POST", "/wasm")],
)
def test_nobody_may_change_whom_the_gateway_calls(base_url: str, method: str, path: str) -> None:
    body = None if method == "GET" else b'{"url": "grpc://127.0.0.1:1"}'
    request = urllib.request.Request(base_url + path, body, {"Content-Type": "application/json"}, method=method)
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(request, timeout=30)
    refused.value.close()


def test_after_a_router_was_away_requests_are_served_at_once(client: openai.OpenAI, cluster: Cluster) -> None:
    """A circuit breaker would refuse them for a minute."""

    def ends_well(_: object = None) -> bool:
        try:
            return bool(client.completions.create(prompt="Once", max_tokens=2, **GREEDY).choices)
        except openai.APIError:
            return False

    def some_fail() -> bool:
        """The first time the router is back before the gateway's last try."""
        if (router := children(cluster.process.pid).get("router")) is not None:
            os.kill(router, signal.SIGKILL)
        with ThreadPoolExecutor(16) as pool:
            return not all(list(pool.map(ends_well, range(16))))

    assert eventually(some_fail, 30)
    assert eventually(ends_well, 30)


LACKS = {
    "/version": ({}, 404),
    "/metrics": ({}, 404),
    "/v1/tokenize": ({"prompt": "Once"}, 200),
    "/tokenize": ({"prompt": "Once"}, 404),
    "/engine_metrics": ({}, 500),
    "/parse/reasoning": ({"text": "a"}, 401),
    "/v1/embeddings": ({"input": "Once"}, 501),
    "/score": ({"text_1": "a", "text_2": "b"}, 404),
    "/v1/completions": ({"prompt": [5, 6, 7], "max_tokens": 1}, 400),
}
"""Paths with what is sent there, and the answer's status."""


@pytest.mark.parametrize("path", LACKS)
def test_what_the_gateway_lacks_is_as_the_page_says(base_url: str, path: str) -> None:
    fields, status = LACKS[path]
    body = json.dumps({"model": "demo", **fields}).encode() if fields else None
    request = urllib.request.Request(base_url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = answer.status
    except urllib.error.HTTPError as error:
        with error:
            found = error.code
    assert found == status


def test_a_field_that_the_gateway_does_not_know_is_not_heeded(client: openai.OpenAI) -> None:
    asked = {"max_tokens": 8, "prompt": "Once", **GREEDY}
    plain = client.completions.create(**asked).choices[0].text
    unknown = {"structured_outputs": {"regex": "[0-9]+"}}
    assert client.completions.create(**asked, extra_body=unknown).choices[0].text == plain
    followed = client.completions.create(**asked, extra_body={"regex": "[0-9]+"}).choices[0].text
    assert re.fullmatch("[0-9]+", followed)


def test_the_gateway_has_the_routers_template_and_log_format_and_options_of_its_own(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} Once upon a time{% endfor %}")
    gateway = ("--http-gateway", "cors-allowed-origins=https://a.example")
    with serve(
        *("demo", "--http", "127.0.0.1:0", "--chat-template", str(template), "--log-format", "json", *gateway)
    ) as cluster:
        address = door_of(cluster)
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        preflight = urllib.request.Request(f"http://{address}/v1/models", None, headers, method="OPTIONS")
        with urllib.request.urlopen(preflight, timeout=30) as allowed:
            assert allowed.headers["Access-Control-Allow-Origin"] == "https://a.example"
        with (
            openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
            Client(cluster.target) as direct,
        ):
            answer = client.chat.completions.create(messages=CHAT, max_tokens=8, **GREEDY)
            expected = direct.complete(messages=CHAT, max_tokens=8, temperature=0.0)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
            assert answer.choices[0].message.content == expected.text
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(messages=CHAT, **(GREEDY | {"model": "nobody"}))
        assert eventually(lambda: any("client error" in line for line in cluster.log))
        assert all(json.loads(line) for line in cluster.log)
