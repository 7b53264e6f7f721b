"""Turns of a conversation as OpenAI's API has them, as the entrance's ChatPrompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.faces.openai.tools import Tool, Tools
from router.request import ChatPrompt
from tandem.errors import InvalidRequest, UnsupportedOption

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class FunctionCall(msgspec.Struct, kw_only=True):
    """Name and arguments, which are JSON, of a call."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant asked for."""

    function: FunctionCall
    id: str = ""
    type: str = "function"
    index: int | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


def chat_prompt(messages: Sequence[Message], tools: Tools, variables: Mapping[str, Any]) -> ChatPrompt:
    """Returns the conversation. Raises UnsupportedOption for what is no text."""
    return ChatPrompt(
        [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)],
        tuple(tool.to_json() for tool in tools.tools),
        {name: json.dumps(value) for name, value in variables.items() if value is not None},
    )


def content_text(part: Mapping[str, Any], path: str) -> str:
    """Returns the text of a piece of content. Raises InvalidRequest, UnsupportedOption."""
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise UnsupportedOption(f"{path}.type", f"takes {', '.join(_TEXT_PARTS)}: the model reads text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text", "must be a string")
    return text


def _turn(message: Message, path: str) -> dict[str, Any]:
    """As templates know it; what is not set stays out, since templates ask for that."""
    if message.audio is not None or message.function_call is not None:
        raise UnsupportedOption(path, "audio and function_call are not taken; tool_calls are")
    # Instructions have another name in the templates of all models but OpenAI's, which take both.
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if isinstance(message.content, list):
        parts = enumerate(message.content)
        turn["content"] = [
            {"type": "text", "text": content_text(part, f"{path}.content[{index}]")} for index, part in parts
        ]
    else:
        turn["content"] = message.content or ""
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    thought = message.reasoning_content or message.reasoning
    named = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": thought}
    return turn | {name: value for name, value in named.items() if value}


class Function(msgspec.Struct, kw_only=True):
    """A function of `tools`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """An entry of `tools`."""

    function: Function
    type: str = "function"

    def tool(self, path: str) -> Tool:
        """Raises UnsupportedOption for a tool that only OpenAI runs."""
        if self.type != "function":
            raise UnsupportedOption(f"{path}.type", "takes function")
        return Tool(self.function.name, self.function.description, self.function.parameters)
