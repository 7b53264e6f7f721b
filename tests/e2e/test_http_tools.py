"""Calls of tools and reasoning that a model writes by itself, as its template shows them, through the three APIs.

The demo model calls nothing: a regular expression makes it write what such a model would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from bench.support.cluster import serve
from tests.http_address import http_address

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor -%}
{# <tool_call>{"name": …, "arguments": …}</tool_call> #}{% if enable_thinking %}<think>{% endif %}"""
WRITTEN = 'On it. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = "Rome it is.</think>\n\n"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
CHAT = [{"role": "user", "content": "The weather in Rome?"}]
WRITES: dict[str, Any] = {"structured_outputs": {"regex": re.escape(WRITTEN)}}
THINKS: dict[str, Any] = {
    "structured_outputs": {"regex": re.escape(THOUGHT + WRITTEN)},
    "chat_template_kwargs": {"enable_thinking": True},
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    template: Path = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(TEMPLATE)
    with serve("demo", "--http", "127.0.0.1:0", "--chat-template", str(template)) as cluster:
        yield http_address(cluster)


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_model_chose_to_make_is_told_from_its_text(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": CHAT,
        "tools": [{"type": "function", "function": FUNCTION}],
        "extra_body": WRITES,
    }
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        calls = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
        name, arguments = calls[0].name, "".join(call.arguments or "" for call in calls)
        reason = chunks[-1].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        (call,) = choice.message.tool_calls
        content, name, arguments, reason = (
            choice.message.content,
            call.function.name,
            call.function.arguments,
            choice.finish_reason,
        )
    assert (content.strip(), name, json.loads(arguments), reason) == (
        "On it.",
        "weather",
        {"city": "Rome"},
        "tool_calls",
    )


def test_without_tools_the_same_text_is_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=CHAT, extra_body=WRITES)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == WRITTEN


@pytest.mark.parametrize("include", [True, False])
def test_reasoning_that_the_template_began_is_told_apart(client: openai.OpenAI, include: bool) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=CHAT,  # type: ignore[arg-type]
        tools=[{"type": "function", "function": FUNCTION}],  # type: ignore[list-item]
        extra_body={**THINKS, "include_reasoning": include},
    )
    message = answer.choices[0].message.model_dump()
    assert message.get("reasoning_content") == ("Rome it is." if include else None)
    assert message["tool_calls"][0]["function"]["name"] == "weather"


def test_anthropics_message_has_them_as_blocks(address: str) -> None:
    """The demo model never ends what the template began."""
    with anthropic.Anthropic(base_url=f"http://{address}", api_key="none", max_retries=0, timeout=60) as client:
        tools: Any = [{"name": "weather", "input_schema": {**PARAMETERS, "additionalProperties": False}}]
        choice: Any = {"type": "auto"}
        said = client.messages.create(
            model="demo",
            max_tokens=8,
            messages=CHAT,  # type: ignore[arg-type]
            tools=tools,
            tool_choice=choice,
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
    assert [block.type for block in said.content] == ["thinking"]
    assert said.stop_reason == "max_tokens"
