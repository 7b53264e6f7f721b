"""Anthropic's request for a message, typed, and what it means to the entrance."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec

from router.faces.openai.conversation import FunctionCall, Message, ToolCall, chat_prompt
from router.faces.openai.sampling import TopK, seed_of
from router.faces.openai.tools import Choice, Tool, Tools
from router.request import ChatPrompt
from router.sampling import SamplingRequest
from tandem.errors import InvalidRequest, UnsupportedOption

Block = dict[str, Any]
_CHOICES = {"auto": Choice.AUTO, "any": Choice.REQUIRED, "none": Choice.NONE}


class Turn(msgspec.Struct, kw_only=True):
    """One turn: text, or blocks."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class MessageTool(msgspec.Struct, kw_only=True):
    """A tool; `type` is that of tools that Anthropic runs."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`auto`, `any`, `none`, or `tool` with its name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model is to think; how much is its own choice."""

    type: Literal["enabled", "adaptive", "disabled"]


class Conversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take: turns, tools and instructions."""

    messages: list[Turn]
    model: str = ""
    system: str | list[Block] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: Any = None
    """Without effect: prefixes are always cached."""

    def resolved_tools(self) -> Tools:
        """Returns the tools with the choice among them. Raises InvalidRequest, UnsupportedOption."""
        given, wanted = self.tools or [], self.tool_choice
        if any(each.type not in (None, "custom") for each in given):
            raise UnsupportedOption("tools", "takes custom tools: the model has none of its own")
        choice: Choice | str | None = None
        if wanted is not None and wanted.type == "tool":
            choice = wanted.name or ""
        elif wanted is not None:
            if wanted.type not in _CHOICES:
                raise InvalidRequest("tool_choice.type", f"takes {', '.join((*_CHOICES, 'tool'))}")
            choice = _CHOICES[wanted.type]
        tools = [Tool(each.name, each.description, each.input_schema) for each in given]
        return Tools.of(tools, choice, parallel=wanted is None or not wanted.disable_parallel_tool_use)

    def prompt(self, tools: Tools) -> ChatPrompt:
        """Returns the conversation. Raises InvalidRequest, UnsupportedOption."""
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        messages = [] if self.system is None else [Message(role="system", content=_text(self.system, "system"))]
        for index, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages[{index}]")
        return chat_prompt(messages, tools, variables)


class MessagesRequest(Conversation, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's request for a message."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: TopK | None = None
    top_p: float | None = None
    # without effect on an answer
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    # what Anthropic has and Tandem has not
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None
    output_config: Any = None
    # Tandem's own
    seed: int | None = None

    def sampling(self, tools: Tools, *, keeps_special_tokens: bool) -> SamplingRequest:
        """Returns the sampling. Raises UnsupportedOption."""
        for name in ("container", "mcp_servers", "context_management", "output_config"):
            if getattr(self, name):
                raise UnsupportedOption(name)
        if self.messages and self.messages[-1].role == "assistant":
            raise UnsupportedOption("messages", "the last turn must be the user's: the assistant's is not continued")
        return SamplingRequest(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=None if self.top_k is None else max(0, self.top_k),
            top_p=self.top_p,
            seed=seed_of(self.seed),
            stop=tuple(self.stop_sequences or ()),
            skip_special_tokens=False if keeps_special_tokens else None,
            **tools.constraint(),  # type: ignore[arg-type]  # a schema
        )


def _messages(turn: Turn, path: str) -> list[Message]:
    """Returns the turns of OpenAI's API that a turn is: each tool result is one of its own."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    texts: list[str] = []
    calls: list[ToolCall] = []
    results: list[Message] = []
    thought: list[str] = []
    for index, block in enumerate(turn.content):
        at = f"{path}.content[{index}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", at))
            case "thinking":
                thought.append(_string(block, "thinking", at))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = FunctionCall(name=_string(block, "name", at), arguments=json.dumps(block.get("input") or {}))
                calls.append(ToolCall(id=_string(block, "id", at), function=function))
            case "tool_result":
                content = _text(block.get("content") or "", f"{at}.content")
                results.append(Message(role="tool", content=content, tool_call_id=_string(block, "tool_use_id", at)))
            case _:
                raise UnsupportedOption(
                    f"{at}.type", "takes text, thinking, tool_use, tool_result: the model reads text only"
                )
    own = [Message(role=turn.role, content="\n".join(texts), tool_calls=calls or None, reasoning="".join(thought))]
    return [*results, *(own if texts or calls or thought or not results else [])]


def _text(content: Any, path: str) -> str:
    """Returns text, or the joined text of text blocks. Raises InvalidRequest, UnsupportedOption."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(path, "must be a string or a list of blocks")
    if any(block.get("type") != "text" for block in content):
        raise UnsupportedOption(path, "takes text blocks: the model reads text only")
    return "\n".join(_string(block, "text", f"{path}[{index}]") for index, block in enumerate(content))


def _string(block: Block, name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name}", "must be a string")
    return value
