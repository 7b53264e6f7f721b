"""`POST /v1/responses`: text and tools; nothing is kept between responses."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from router.choice_stream import ChoiceOutput
from router.entrance import RunningRequest
from router.faces.openai.conversation import FunctionCall, Message, ToolCall, chat_prompt
from router.faces.openai.desk import ChoiceReader, Desk, outputs, usage
from router.faces.openai.errors import openai_error
from router.faces.openai.reading import read_body
from router.faces.openai.sampling import JsonSchema, ResponseFormat, Uint32
from router.faces.openai.sse import Event, answer_stream, answer_whole
from router.faces.openai.tools import Tool, Tools, new_call_id, tool_choice
from router.faces.parsers.parts import CallArguments, CallBegan, Part, Reasoning, Text
from router.request import CompletionRequest
from router.sampling import SamplingRequest
from shell.http.server import Call
from tandem.errors import TandemError, UnsupportedOption
from tandem.types import FinishReason


class Item(msgspec.Struct, kw_only=True):
    """An item of `input`: a message, a call, its result, or reasoning."""

    type: str = "message"
    role: str = ""
    content: str | list[dict[str, Any]] | None = None
    name: str = ""
    arguments: str = ""
    call_id: str = ""
    output: str | list[dict[str, Any]] = ""

    def message(self, path: str) -> Message:
        """Returns the turn that it is. Raises UnsupportedOption."""
        match self.type:
            case "message":
                return Message(role=self.role, content=self.content)
            case "function_call":
                call = ToolCall(id=self.call_id, function=FunctionCall(name=self.name, arguments=self.arguments))
                return Message(role="assistant", tool_calls=[call])
            case "function_call_output":
                return Message(role="tool", content=self.output, tool_call_id=self.call_id)
            case "reasoning":
                parts = self.content if isinstance(self.content, list) else []
                return Message(role="assistant", reasoning="".join(str(part.get("text", "")) for part in parts))
        raise UnsupportedOption(f"{path}.type", "takes message, function_call, function_call_output, reasoning")


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function that may be called."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(JsonSchema, kw_only=True, forbid_unknown_fields=True):
    """`text.format`."""

    type: str


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's request for a response."""

    input: str | list[Item]
    model: str = ""
    instructions: str | None = None
    max_output_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: str | None = None
    # without effect on an answer
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream_options: dict[str, Any] | None = None
    # what OpenAI has and Tandem has not
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    include: list[str] | None = None
    prompt: Any = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None

    def resolved_tools(self) -> Tools:
        """Returns the tools with the choice among them. Raises InvalidRequest, UnsupportedOption."""
        given = self.tools or []
        if any(each.type != "function" for each in given):
            raise UnsupportedOption("tools", "takes functions: the model has no tools of its own")
        tools = [Tool(each.name, each.description, each.parameters) for each in given]
        return Tools.of(tools, tool_choice(self.tool_choice), parallel=self.parallel_tool_calls is not False)

    def completion(self, desk: Desk, tools: Tools, request_id: str) -> CompletionRequest:
        """Returns what the entrance takes. Raises InvalidRequest, UnsupportedOption."""
        lacking = ("store", "background", "previous_response_id", "conversation", "include", "prompt")
        for name in (*lacking, "max_tool_calls", "top_logprobs"):
            if getattr(self, name):
                raise UnsupportedOption(name, "is not there: each response is computed from its own input alone")
        if self.reasoning is not None and (self.reasoning.summary or self.reasoning.generate_summary):
            raise UnsupportedOption("reasoning.summary", "reasoning is told whole, not in summary")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise UnsupportedOption("text.verbosity", "no template knows it")
        if self.truncation not in (None, "disabled"):
            raise UnsupportedOption("truncation", "takes disabled: a prompt is never cut")
        effort = None if self.reasoning is None else self.reasoning.effort
        variables = {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
        return CompletionRequest(
            prompt=chat_prompt(self._messages(), tools, variables),
            sampling=SamplingRequest(
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                skip_special_tokens=False if desk.needs_special_tokens(tools) else None,
                **self._constraint(tools),
            ),
            request_id=request_id,
            model=self.model,
        )

    def _constraint(self, tools: Tools) -> dict[str, Any]:
        wanted = None if self.text is None else self.text.format
        if tools.constraint() or wanted is None:
            return tools.constraint()
        return ResponseFormat(type=wanted.type, json_schema=wanted).constraint()

    def _messages(self) -> list[Message]:
        """Returns the turns; what the assistant thought and called in succession is one turn."""
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        joined = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        for index, item in enumerate(items):
            turn = item.message(f"input[{index}]")
            last = joined[-1] if joined else turn
            if last is turn or not _goes_on(last, turn):
                joined.append(turn)
                continue
            last.content = turn.content if last.content is None else last.content
            last.tool_calls = [*(last.tool_calls or ()), *(turn.tool_calls or ())]
            last.reasoning = last.reasoning or turn.reasoning
        return joined


def _goes_on(last: Message, turn: Message) -> bool:
    """Whether `turn` is a further part of the assistant's turn `last`: its text behind reasoning, calls behind both."""
    has_room = turn.content is None or (last.content is None and not last.tool_calls)
    return last.role == turn.role == "assistant" and has_room


async def respond(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers a request for a response. Raises TandemError before anything is sent."""
    with desk.entrance.judging():
        request = read_body(await call.body(), ResponsesRequest)
        tools = request.resolved_tools()
        tools.check(desk.answers)
        completion, caller = request.completion(desk, tools, desk.request_id(call)), desk.caller(call)
    async with desk.entrance.run(completion, caller) as running:
        (reader,) = await desk.choice_readers(running, 1, tools, keeps_end=False)
        response = _Response(desk.model, request, tools, running)
        if not request.stream:
            (found,) = await running.delivery.get_all()
            for part in reader.read(found):
                response.take(part)
            await response.count_reasoning(desk)
            return await answer_whole(call, running.request_id, response.closed(found))
        events = _events(desk, running, reader, response)
        return await answer_stream(call, running.request_id, events, response.failed, named=True)


async def _events(
    desk: Desk, running: RunningRequest, reader: ChoiceReader, response: _Response
) -> AsyncGenerator[Event, None]:
    begins = True
    async for output in outputs(running):
        if begins:
            for event in response.begin():
                yield event
        begins = False
        for part in reader.read(output):
            for event in response.take(part):
                yield event
        if output.summary is not None:
            await response.count_reasoning(desk)
            for event in response.end(output):
                yield event


@dataclass(frozen=True, slots=True)
class _Kind:
    """What items of text of a kind, their one piece and its events hold beside the text."""

    prefix: str
    piece: str
    of_item: Mapping[str, Any]
    of_piece: Mapping[str, Any]
    of_event: Mapping[str, Any]


_KINDS = {
    "message": _Kind("msg", "output_text", {"role": "assistant"}, {"annotations": []}, {"logprobs": []}),
    "reasoning": _Kind("rs", "reasoning_text", {"summary": []}, {}, {}),
}


class _Response:
    """The response as it grows, with the events that tell of it."""

    def __init__(self, model: str, request: ResponsesRequest, tools: Tools, running: RunningRequest) -> None:
        self._items: list[dict[str, Any]] = []
        self._reasoning_tokens = 0
        self._number = 0
        self._body: dict[str, Any] = {
            "id": f"resp_{running.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": tools.parallel,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}, **_given(request.text)},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_given(each) for each in request.tools or ()],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def begin(self) -> list[dict[str, Any]]:
        """Returns the events before anything of the output."""
        return [
            self._event("response.created", response=self._body),
            self._event("response.in_progress", response=self._body),
        ]

    def take(self, part: Part) -> list[dict[str, Any]]:
        """Adds a part; returns its events."""
        match part:
            case Text(text):
                return self._add("message", text)
            case Reasoning(text):
                return self._add("reasoning", text)
            case CallBegan(name):
                item = {"id": _new_id("fc"), "type": "function_call", "call_id": new_call_id(), "name": name}
                return [*self._close(), *self._open({**item, "arguments": ""})]
            case CallArguments(text):
                self._items[-1]["arguments"] += text
                return [self._delta("response.function_call_arguments.delta", text)]

    async def count_reasoning(self, desk: Desk) -> None:
        """Counts the tokens of the text that was thought; what marks it counts as answer."""
        for item in self._items:
            if item["type"] == "reasoning":
                text = item["content"][0]["text"]
                self._reasoning_tokens += len(await desk.tokenization.encode_text(text, add_special_tokens=False))

    def closed(self, found: ChoiceOutput) -> dict[str, Any]:
        """Ends the response; returns it."""
        self._close(_status(found))
        assert found.summary is not None
        self._body["status"] = _status(found)
        if found.finish_reason is FinishReason.LENGTH:
            self._body["incomplete_details"] = {"reason": "max_output_tokens"}
        spent = usage([found.summary])
        self._body |= {
            "output": self._items,
            "usage": {
                "input_tokens": spent["prompt_tokens"],
                "input_tokens_details": {**spent["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": spent["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": spent["total_tokens"],
            },
        }
        return self._body

    def end(self, found: ChoiceOutput) -> list[dict[str, Any]]:
        """Ends the response; returns the last events."""
        events, body = self._close(_status(found)), self.closed(found)
        return [*events, self._event(f"response.{body['status']}", response=body)]

    def failed(self, error: TandemError) -> list[dict[str, Any]]:
        """Returns the events of a response that ends badly."""
        told = openai_error(error)["error"]
        self._body |= {"status": "failed", "error": {"code": told["code"], "message": told["message"]}}
        return [
            *self._close("incomplete"),
            self._event("response.failed", response={**self._body, "output": self._items}),
        ]

    def _add(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Adds text to the item of that kind, a new one if another kind is open."""
        words = _KINDS[kind]
        events: list[dict[str, Any]] = []
        if not self._items or self._items[-1]["type"] != kind or self._items[-1]["status"] != "in_progress":
            item = {"id": _new_id(words.prefix), "type": kind, "content": [], **words.of_item}
            events = [*self._close(), *self._open(item)]
            piece = {"type": words.piece, "text": "", **words.of_piece}
            self._items[-1]["content"].append(piece)
            events.append(self._of_part("response.content_part.added", part=dict(piece)))
        self._items[-1]["content"][0]["text"] += text
        return [*events, self._of_part(f"response.{words.piece}.delta", delta=text, **words.of_event)]

    def _open(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        self._items.append({**item, "status": "in_progress"})
        return [self._of_item("response.output_item.added")]

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Ends the open item, if there is one; returns its events."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            position = {"item_id": item["id"], "output_index": len(self._items) - 1}
            told = {"arguments": item["arguments"], "name": item["name"]}
            done = [self._event("response.function_call_arguments.done", **position, **told)]
        else:
            words, piece = _KINDS[item["type"]], item["content"][0]
            done = [
                self._of_part(f"response.{words.piece}.done", text=piece["text"], **words.of_event),
                self._of_part("response.content_part.done", part=piece),
            ]
        return [*done, self._of_item("response.output_item.done")]

    def _delta(self, kind: str, text: str) -> dict[str, Any]:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, delta=text)

    def _of_item(self, kind: str) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._items) - 1, item=copy.deepcopy(self._items[-1]))

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _status(found: ChoiceOutput) -> str:
    """Returns the status of a response, and of its last item, by its last output."""
    return "incomplete" if found.finish_reason is FinishReason.LENGTH else "completed"


def _given(fields: msgspec.Struct | None) -> dict[str, Any]:
    """Returns the fields that are set, as JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(fields) if fields is not None else {}
    return {name: value for name, value in plain.items() if value is not None}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
