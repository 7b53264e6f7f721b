"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from aiohttp import web

from router.choice_stream import ChoiceOutput
from router.entrance import RunningRequest
from router.faces.anthropic.request import Conversation, MessagesRequest
from router.faces.openai.desk import ChoiceReader, Desk, outputs
from router.faces.openai.errors import anthropic_error
from router.faces.openai.reading import read_body
from router.faces.openai.sse import Event, answer_stream, answer_whole
from router.faces.openai.tools import new_call_id
from router.faces.parsers.parts import CallArguments, CallBegan, Part, Reasoning, Text
from router.request import CompletionRequest
from shell.http.server import Call
from tandem.types import FinishReason


async def create_message(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers a request for a message. Raises TandemError before anything is sent."""
    with desk.entrance.judging():
        request = read_body(await call.body(), MessagesRequest)
        tools = request.resolved_tools()
        tools.check(desk.answers)
        sampling = request.sampling(tools, keeps_special_tokens=desk.needs_special_tokens(tools))
        completion = CompletionRequest(request.prompt(tools), sampling, desk.request_id(call), request.model)
        caller = desk.caller(call)
    async with desk.entrance.run(completion, caller) as running:
        (reader,) = await desk.choice_readers(running, 1, tools, keeps_end=False)
        answer = _Answer(desk.model, running, reader)
        return await (answer.stream(call) if request.stream else answer.whole(call))


async def count_tokens(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers how many tokens a conversation has."""
    request = read_body(await call.body(), Conversation)
    desk.entrance.check_model(request.model)
    token_ids = await desk.entrance.tokenize(request.prompt(request.resolved_tools()))
    return web.json_response({"input_tokens": len(token_ids)})


class _Answer:
    """Blocks of one message, whole or as events."""

    def __init__(self, model: str, running: RunningRequest, reader: ChoiceReader) -> None:
        self._running = running
        self._reader = reader
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""
        self._is_open = False
        self._message: dict[str, Any] = {
            "id": f"msg_{running.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def whole(self, call: Call) -> web.StreamResponse:
        (found,) = await self._running.delivery.get_all()
        for part in self._reader.read(found):
            self._take(part)
        self._close()
        body = {**self._message, "content": self._blocks, **self._end(found), "usage": self._usage(found)}
        return await answer_whole(call, self._running.request_id, body)

    async def stream(self, call: Call) -> web.StreamResponse:
        return await answer_stream(
            call, self._running.request_id, self._events(), lambda error: [anthropic_error(error)], named=True
        )

    async def _events(self) -> AsyncGenerator[Event, None]:
        begins = True
        async for output in outputs(self._running):
            if begins:
                spent = {"input_tokens": len(self._running.prompt_token_ids), "output_tokens": 0}
                yield {"type": "message_start", "message": {**self._message, "usage": spent}}
            begins = False
            for part in self._reader.read(output):
                for event in self._take(part):
                    yield event
            if output.summary is not None:
                for event in self._close():
                    yield event
                yield {"type": "message_delta", "delta": self._end(output), "usage": self._usage(output)}
                yield {"type": "message_stop"}

    def _take(self, part: Part) -> list[dict[str, Any]]:
        """Adds a part; returns its events."""
        match part:
            case Text(text):
                return self._add("text", "text", text)
            case Reasoning(text):
                return self._add("thinking", "thinking", text)
            case CallBegan(name):
                return self._open({"type": "tool_use", "id": new_call_id("toolu_"), "name": name, "input": {}})
            case CallArguments(text):
                self._arguments += text
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def _add(self, kind: str, key: str, text: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if not self._is_open or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._open({"type": kind, key: "", **signature})
        self._blocks[-1][key] += text
        return [*events, self._delta({"type": f"{kind}_delta", key: text})]

    def _open(self, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._blocks.append(dict(block))
        self._is_open, self._arguments = True, ""
        index = len(self._blocks) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": dict(block)}]

    def _close(self) -> list[dict[str, Any]]:
        """Ends the open block, if there is one; returns its event."""
        if not self._is_open:
            return []
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end(self, output: ChoiceOutput) -> dict[str, Any]:
        matched = output.matched_stop
        if output.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": "tool_use" if self._reader.called else "end_turn", "stop_sequence": None}

    def _usage(self, output: ChoiceOutput) -> dict[str, int]:
        """Anthropic counts as input what no cache held."""
        assert output.summary is not None
        cached = output.summary.cached_tokens
        return {
            "input_tokens": output.summary.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": output.summary.completion_tokens,
        }


def _object(text: str) -> Any:
    """Returns the arguments of a call; of one that was cut short, none."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
