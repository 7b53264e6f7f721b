"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from aiohttp import web

from router.choice_stream import ChoiceOutput
from router.entrance import RunningRequest
from router.faces.openai.conversation import FunctionTool, Message, chat_prompt
from router.faces.openai.desk import ChoiceReader, Desk, outputs, usage, usage_so_far
from router.faces.openai.errors import openai_error
from router.faces.openai.logprobs import LogprobsWriter
from router.faces.openai.reading import read_body
from router.faces.openai.sampling import SamplingFields, Uint32
from router.faces.openai.sse import Event, answer_stream, answer_whole
from router.faces.openai.tools import Tools, new_call_id, tool_choice
from router.faces.parsers.parts import CallArguments, CallBegan, Reasoning, Text
from router.request import CompletionRequest
from shell.http.server import Call
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.types import TokenLogprobs


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's request for a chat completion, with vLLM's additions."""

    messages: list[Message]
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    modalities: list[str] | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None

    def resolved_tools(self) -> Tools:
        """Returns the tools with the choice among them. Raises InvalidRequest, UnsupportedOption."""
        tools = [each.tool(f"tools[{index}]") for index, each in enumerate(self.tools or ())]
        return Tools.of(tools, tool_choice(self.tool_choice), parallel=self.parallel_tool_calls is not False)

    def completion(self, desk: Desk, tools: Tools, request_id: str) -> CompletionRequest:
        """Returns what the entrance takes. Raises InvalidRequest, UnsupportedOption."""
        _refuse_unknown(self)
        variables: dict[str, Any] = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        if not self.add_generation_prompt:
            variables["add_generation_prompt"] = False
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "goes with logprobs: true")
        others: dict[str, Any] = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        if self.max_completion_tokens is not None:
            others["max_tokens"] = self.max_completion_tokens
        if desk.needs_special_tokens(tools):
            others["skip_special_tokens"] = False
        return CompletionRequest(
            prompt=chat_prompt(self.messages, tools, variables | (self.chat_template_kwargs or {})),
            sampling=self.sampling(**others, **tools.constraint()),
            request_id=request_id,
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt or "",
        )


async def chat(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers a chat. Raises TandemError before anything is sent."""
    with desk.entrance.judging():
        request = read_body(await call.body(), ChatRequest)
        tools = request.resolved_tools()
        tools.check(desk.answers)
        request_id = desk.request_id(call, request.request_id)
        completion, caller = request.completion(desk, tools, request_id), desk.caller(call)
    async with desk.entrance.run(completion, caller) as running:
        keeps_end = request.skip_special_tokens is False
        readers = await desk.choice_readers(running, request.num_choices, tools, keeps_end=keeps_end)
        answer = _Answer(desk, request, running, readers)
        return await (answer.stream(call) if request.stream else answer.whole(call))


class _Answer:
    def __init__(
        self, desk: Desk, request: ChatRequest, running: RunningRequest, readers: Sequence[ChoiceReader]
    ) -> None:
        self._request = request
        self._running = running
        self._readers = readers
        self._writer = LogprobsWriter(desk.tokenization, bool(request.return_tokens_as_token_ids))
        self._head = {"id": f"chatcmpl-{running.request_id}", "created": int(time.time()), "model": desk.model}

    async def whole(self, call: Call) -> web.StreamResponse:
        found = await self._running.delivery.get_all()
        summary = found[-1].summary
        assert summary is not None
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(each) for each in found],
            "usage": usage([summary]),
        }
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._writer.prompt(found[0].prompt_logprobs)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = list(self._running.prompt_token_ids)
        return await answer_whole(call, self._running.request_id, body)

    async def stream(self, call: Call) -> web.StreamResponse:
        return await answer_stream(
            call, self._running.request_id, self._events(), lambda error: [openai_error(error)], named=False
        )

    async def _events(self) -> AsyncGenerator[Event, None]:
        deltas = [_Deltas(reader, with_reasoning=self._request.include_reasoning) for reader in self._readers]
        num_tokens = 0
        options = self._request.stream_options
        async for output in outputs(self._running):
            num_tokens += len(output.token_ids)
            if (chunk := self._new_chunk(output, deltas[output.index], num_tokens)) is not None:
                yield chunk
            if output.summary is not None and options is not None and options.include_usage:
                yield self._chunk([], usage([output.summary]))

    def _new_chunk(self, output: ChoiceOutput, deltas: _Deltas, num_tokens: int) -> Event | None:
        """Returns what an output adds; None = nothing. `num_tokens`: of all choices so far."""
        begins, delta = deltas.begins, deltas.read(output)
        ends = output.finish_reason is not None
        if not (delta or ends or output.logprobs or output.prompt_logprobs or self._request.return_token_ids):
            return None
        choice: dict[str, Any] = {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if output.logprobs:
            choice["logprobs"] = self._writer.chat(output.logprobs)
        if ends:
            choice["finish_reason"] = deltas.reader.finish_reason(output)
            choice["stop_reason"] = output.matched_stop
        if self._request.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        options, running = self._request.stream_options, None
        if options is not None and options.continuous_usage_stats:
            running = usage_so_far(len(self._running.prompt_token_ids), num_tokens)
        chunk = self._chunk([choice], running)
        if output.prompt_logprobs:
            chunk["prompt_logprobs"] = self._prompt_piece(output.prompt_logprobs, begins)
        if begins and self._request.return_token_ids:
            chunk["prompt_token_ids"] = list(self._running.prompt_token_ids)
        return chunk

    def _prompt_piece(self, logprobs: tuple[TokenLogprobs, ...], first: bool) -> list[Any]:
        written = self._writer.prompt(logprobs)
        return written if first else written[1:]

    def _chunk(self, choices: list[dict[str, Any]], spent: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        options = self._request.stream_options
        if spent is not None or (options is not None and options.include_usage):
            chunk["usage"] = spent
        return chunk

    def _choice(self, output: ChoiceOutput) -> dict[str, Any]:
        reader = self._readers[output.index]
        message = {**_Deltas(reader, with_reasoning=self._request.include_reasoning).read(output), "refusal": None}
        for call in message.get("tool_calls", ()):
            del call["index"]
            message["content"] = message["content"] or None
        choice = {
            "index": output.index,
            "message": message,
            "logprobs": self._writer.chat(output.logprobs) if self._request.logprobs else None,
            "finish_reason": reader.finish_reason(output),
            "stop_reason": output.matched_stop,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice


class _Deltas:
    """One choice's parts as deltas: the first names the role, each call has an index. Of a whole answer, one delta."""

    def __init__(self, reader: ChoiceReader, *, with_reasoning: bool) -> None:
        self.reader = reader
        self.begins = True
        self._with_reasoning = with_reasoning
        self._num_calls = 0

    def read(self, output: ChoiceOutput) -> dict[str, Any]:
        """Returns what is new, perhaps nothing."""
        delta: dict[str, Any] = {}
        if self.begins:
            delta, self.begins = {"role": "assistant", "content": ""}, False
        for part in self.reader.read(output):
            match part:
                case Text(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text) if self._with_reasoning:
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallBegan(name):
                    function = {"name": name, "arguments": ""}
                    call = {"index": self._num_calls, "id": new_call_id(), "type": "function", "function": function}
                    delta.setdefault("tool_calls", []).append(call)
                    self._num_calls += 1
                case CallArguments(text):
                    self._add_arguments(delta.setdefault("tool_calls", []), text)
        return delta

    def _add_arguments(self, calls: list[dict[str, Any]], text: str) -> None:
        if not calls:
            calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text


def _refuse_unknown(request: ChatRequest) -> None:
    """Raises UnsupportedOption for what OpenAI or vLLM have and Tandem has not."""
    refused = {
        "add_special_tokens": (bool(request.add_special_tokens), "the template writes all special tokens of a chat"),
        "chat_template": (request.chat_template is not None, "templates come from the server's --chat-template"),
        "continue_final_message": (request.continue_final_message, "the assistant always begins a turn"),
        "echo": (request.echo, "the prompt of a chat is not repeated"),
        "verbosity": (request.verbosity not in (None, "medium"), "no template knows it"),
        "modalities": (request.modalities not in (None, ["text"]), "takes text"),
    }
    for name, (is_wanted, why) in refused.items():
        if is_wanted:
            raise UnsupportedOption(name, why)
