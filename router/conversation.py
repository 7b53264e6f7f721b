"""A chat as templates take it: plain data, with the caller's JSON read.

messages    role, content (text, or a list of `{"type": "text", "text": …}`), tool_calls, tool_call_id, name, …
tools       as OpenAI's API has them
variables   whatever a template asks for, such as Qwen3's `enable_thinking`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.request import ChatPrompt
from tandem.errors import InvalidRequest

_OWN = frozenset({"messages", "tools"})
"""Names that no variable may have: fields of the conversation."""

_OF_THE_FORMAT = frozenset({"role", "type"})
"""Keys whose values are not the caller's own words."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Read, and ready to be rendered."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    template_name: str = ""

    def texts(self) -> Iterator[str]:
        """Yields every text of the conversation that is no word of the format."""
        for each in (*self.messages, *self.tools, self.variables):
            yield from _texts(each, _OF_THE_FORMAT)


def read_conversation(prompt: ChatPrompt) -> Conversation:
    """Raises InvalidRequest naming the field whose JSON is none, or is no object where one is wanted."""
    messages = [_with_arguments(message, f"chat.messages[{index}]") for index, message in enumerate(prompt.messages)]
    tools = [_object(text, f"chat.tools[{index}]") for index, text in enumerate(prompt.tools)]
    if taken := sorted(_OWN & prompt.variables.keys()):
        raise InvalidRequest("chat.template_variables", f"{taken[0]} is a field of its own")
    variables = {name: _json(text, f"chat.template_variables[{name}]") for name, text in prompt.variables.items()}
    return Conversation(messages, tools, variables, prompt.template_name)


def num_bytes(prompt: ChatPrompt) -> int:
    """Returns the bytes of all text that the caller sent."""
    parts = (*prompt.messages, *prompt.tools, *prompt.variables.values())
    return sum(len(text.encode()) for part in parts for text in _texts(part))


def _with_arguments(message: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Parses arguments: templates write them as JSON, and so get them as data."""
    if "tool_calls" not in message:
        return message
    calls = []
    for index, call in enumerate(message["tool_calls"]):
        function = call["function"]
        arguments = _object(function["arguments"] or "{}", f"{path}.tool_calls[{index}].arguments")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _object(text: str, path: str) -> dict[str, Any]:
    value = _json(text, path)
    if not isinstance(value, dict):
        raise InvalidRequest(path, "must be a JSON object")
    return value


def _json(text: str, path: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(path, "is no JSON") from error


def _texts(value: Any, without: frozenset[str] = frozenset()) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in without:
                yield from _texts(each, without)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each, without)
