"""OpenAI's and Anthropic's own clients, unmodified, over `tandem serve --http`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from bench.support.cluster import Cluster, becomes_idle, eventually, serve
from bench.support.processes import children
from tandem.client import Client
from tests.at_rest import nothing_runs
from tests.http_address import http_address

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
    return f"http://{http_address(cluster)}"


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


def test_a_streamed_call_is_the_whole_one_in_pieces(client: openai.OpenAI, messages: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    chunks = list(
        client.chat.completions.create(
            messages=CHAT, max_tokens=800, tools=[tool], tool_choice="required", stream=True, **GREEDY
        )
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (deltas[0].index, deltas[0].function.name) == (0, "weather")
    assert json.loads("".join(each.function.arguments or "" for each in deltas))["city"] in {"Paris", "Rome"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    tools = [{"name": "weather", "input_schema": CITY}]
    with messages.stream(
        messages=CHAT, max_tokens=800, tools=tools, tool_choice={"type": "tool", "name": "weather"}, **GREEDY_MESSAGES
    ) as stream:
        said = stream.get_final_message()
    assert said.stop_reason == "tool_use"
    assert said.content[0].input["city"] in {"Paris", "Rome"}
    called = client.responses.create(
        input="Where?",
        tools=[{"type": "function", **tool["function"]}],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=400,
        **GREEDY,
    )
    (item,) = called.output
    assert (item.type, item.name) == ("function_call", "weather")


def test_a_conversation_with_calls_and_results_goes_on(client: openai.OpenAI, messages: Any) -> None:
    """The same conversation in the words of the three APIs has the same prompt."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        *CHAT,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "dry"},
    ]
    chat = client.chat.completions.create(messages=turns, max_tokens=8, **GREEDY)
    used = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
    told = [
        *CHAT,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "dry"}]},
    ]
    message = messages.create(messages=told, max_tokens=8, **GREEDY_MESSAGES)
    items = [
        *CHAT,
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "dry"},
    ]
    response = client.responses.create(input=items, max_output_tokens=8, **GREEDY)
    assert chat.choices[0].message.content == message.content[0].text == response.output_text
    assert chat.usage is not None
    counted = messages.count_tokens(model="demo", messages=told).input_tokens
    assert chat.usage.prompt_tokens == response.usage.input_tokens == counted


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


def test_after_a_router_was_away_requests_are_served_again(client: openai.OpenAI, cluster: Cluster) -> None:
    """At the same address."""
    os.kill(children(cluster.process.pid)["router"], signal.SIGKILL)

    def ends_well() -> bool:
        try:
            return bool(client.completions.create(prompt="Once", max_tokens=2, **GREEDY).choices)
        except openai.APIError:
            return False

    assert eventually(ends_well, 30)
