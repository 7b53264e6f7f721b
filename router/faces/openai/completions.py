"""`POST /v1/completions`: one or more prompts, each a request of its own to the entrance."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from router.choice_stream import ChoiceOutput
from router.faces.openai.desk import Desk, outputs, usage, usage_so_far
from router.faces.openai.errors import openai_error
from router.faces.openai.logprobs import LogprobsWriter
from router.faces.openai.reading import read_body
from router.faces.openai.sampling import SamplingFields, StreamOptions, Uint32
from router.faces.openai.sse import Event, answer_stream, answer_whole
from router.metrics import Summary
from router.request import Caller, CompletionRequest, TextPrompt, TokensPrompt
from shell.http.server import Call
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.types import TokenId, TokenLogprobs

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's and vLLM's default for this endpoint alone."""
MAX_PROMPTS = 256
"""Most prompts of a request, and with `n` most choices."""


class CompletionsRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's request for text completions, with vLLM's additions."""

    prompt: str | list[str | Uint32 | list[Uint32]]
    logprobs: Uint32 | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: Uint32 | None = None

    def prompts(self) -> list[TextPrompt | TokensPrompt]:
        """Returns the prompts. Raises InvalidRequest."""
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if given and all(isinstance(each, int) for each in given):
            return [TokensPrompt(given)]
        if not given or any(isinstance(each, int) for each in given):
            raise InvalidRequest("prompt", "must be a text, a list of texts, token ids, or a list of lists of those")
        if len(given) * max(1, self.num_choices) > MAX_PROMPTS:
            raise InvalidRequest(
                "prompt", f"{len(given)} prompts with n choices each exceed the limit of {MAX_PROMPTS}"
            )
        special = self.add_special_tokens is not False
        return [TextPrompt(each, special) if isinstance(each, str) else TokensPrompt(each) for each in given]

    def completions(self, request_id: str) -> list[CompletionRequest]:
        """Returns what the entrance takes, by prompt. Raises InvalidRequest, UnsupportedOption.

        `request_id`: empty = one is drawn.
        """
        if self.suffix:
            raise UnsupportedOption("suffix", "text is continued, not filled in")
        if self.best_of not in (None, self.num_choices):
            raise UnsupportedOption("best_of", "must equal n: all choices that are computed are answered")
        others: dict[str, Any] = {"max_tokens": _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens}
        if self.echo and self.max_tokens == 0:
            others["max_tokens"] = 1  # which is dropped: the prompt alone is wanted
        if self.logprobs is not None:
            others["logprobs"] = self.logprobs
            if self.echo:
                others["prompt_logprobs"] = self.logprobs if self.prompt_logprobs is None else self.prompt_logprobs
        prompts, sampling = self.prompts(), self.sampling(**others)
        name = request_id or secrets.token_hex(16)
        names = [f"{name}-{index}" for index in range(len(prompts))] if len(prompts) > 1 else [name]
        salt = self.cache_salt or ""
        return [
            CompletionRequest(prompt, sampling, name, self.model, self.priority, salt)
            for prompt, name in zip(prompts, names, strict=True)
        ]


async def complete(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers a request for completions. Raises TandemError before anything is sent."""
    with desk.entrance.judging():
        request = read_body(await call.body(), CompletionsRequest)
        wanted = request.completions(desk.request_id(call, request.request_id))
        caller = desk.caller(call)
    answer = _Answer(desk, request, wanted, caller)
    return await (answer.stream(call) if request.stream else answer.whole(call))


@dataclass(frozen=True, slots=True)
class _Output:
    """An output of the prompt with that index."""

    index: int
    prompt_token_ids: Sequence[TokenId]
    output: ChoiceOutput


@dataclass(slots=True)
class _Written:
    """What has been written of a choice."""

    num_characters: int = 0
    """Characters of its tokens; its text may lag behind them."""
    begun: bool = False


class _Answer:
    def __init__(
        self, desk: Desk, request: CompletionsRequest, wanted: Sequence[CompletionRequest], caller: Caller
    ) -> None:
        self._desk = desk
        self._request = request
        self._wanted = wanted
        self._caller = caller
        self._writer = LogprobsWriter(desk.tokenization, bool(request.return_tokens_as_token_ids))
        self._id = wanted[0].request_id if len(wanted) == 1 else wanted[0].request_id.removesuffix("-0")
        self._head = {
            "id": f"cmpl-{self._id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": desk.model,
        }
        self._prompt_only = request.echo and request.max_tokens == 0

    async def whole(self, call: Call) -> web.StreamResponse:
        if len(self._wanted) == 1:
            async with self._desk.entrance.run(self._wanted[0], self._caller) as running:
                found = await running.delivery.get_all()
                return await self._answer([found], [running.prompt_token_ids], call)
        # Each ends for the router when it is gathered: a place that waits for the other prompts may be what they need.
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._gather(each)) for each in self._wanted]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        gathered = [task.result() for task in tasks]
        return await self._answer([found for found, _ in gathered], [ids for _, ids in gathered], call)

    async def _gather(self, wanted: CompletionRequest) -> tuple[tuple[ChoiceOutput, ...], Sequence[TokenId]]:
        async with self._desk.entrance.run(wanted, self._caller) as running:
            return await running.delivery.get_all(), running.prompt_token_ids

    async def _answer(
        self, found: Sequence[Sequence[ChoiceOutput]], prompts: Sequence[Sequence[TokenId]], call: Call
    ) -> web.StreamResponse:
        """`found`: by prompt, its choices whole."""
        choices = []
        for index, of_prompt in enumerate(found):
            echoed = await self._echoed(index, prompts[index])
            for output in of_prompt:
                each = _Output(index, prompts[index], output)
                choices.append(self._choice(each, _Written(), of_prompt[0].prompt_logprobs, echoed))
        summaries = [summary for each in found if (summary := each[-1].summary) is not None]
        body = {**self._head, "choices": choices, "usage": self._usage(summaries)}
        return await answer_whole(call, self._id, body)

    async def stream(self, call: Call) -> web.StreamResponse:
        return await answer_stream(call, self._id, self._events(), lambda error: [openai_error(error)], named=False)

    async def _events(self) -> AsyncGenerator[Event, None]:
        written: dict[int, _Written] = {}
        prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in self._wanted]
        summaries: list[Summary] = []
        options = self._request.stream_options or StreamOptions()
        num_prompt_tokens: dict[int, int] = {}
        num_tokens = 0
        async with aclosing(self._outputs()) as found:
            async for each in found:
                output = each.output
                state = written.setdefault(self._position(each), _Written())
                prompt_logprobs[each.index] += output.prompt_logprobs
                if output.token_ids or output.finish_reason is not None:
                    echoed = "" if state.begun else await self._echoed(each.index, each.prompt_token_ids)
                    choices = [self._choice(each, state, prompt_logprobs[each.index], echoed)]
                    num_prompt_tokens[each.index] = len(each.prompt_token_ids)
                    num_tokens += len(output.token_ids)
                    so_far: dict[str, Any] = {"usage": None} if options.include_usage else {}
                    if options.continuous_usage_stats:
                        so_far = {"usage": usage_so_far(sum(num_prompt_tokens.values()), num_tokens)}
                    yield {**self._head, "choices": choices, **so_far}
                if output.summary is not None:
                    summaries.append(output.summary)
        if options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage(summaries)}

    async def _outputs(self) -> AsyncGenerator[_Output, None]:
        """Yields outputs of all prompts as they come. What a slow caller does not read waits in the deliveries."""
        if len(self._wanted) == 1:
            async with self._desk.entrance.run(self._wanted[0], self._caller) as running:
                async for output in outputs(running):
                    yield _Output(0, running.prompt_token_ids, output)
            return
        queue: asyncio.Queue[_Output | Exception] = asyncio.Queue(1)
        tasks = [
            asyncio.create_task(self._read(index, queue), name=f"read prompt {index}")
            for index in range(len(self._wanted))
        ]
        try:
            num_open = len(tasks)
            while num_open:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                num_open -= found.output.summary is not None
                yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, index: int, queue: asyncio.Queue[_Output | Exception]) -> None:
        try:
            async with self._desk.entrance.run(self._wanted[index], self._caller) as running:
                async for output in outputs(running):
                    await queue.put(_Output(index, running.prompt_token_ids, output))
        except Exception as error:  # noqa: BLE001  (raised again by the reader of the queue)
            await queue.put(error)

    def _usage(self, summaries: Sequence[Summary]) -> dict[str, Any]:
        spent = usage(summaries)
        return {**spent, **usage_so_far(spent["prompt_tokens"], 0)} if self._prompt_only else spent

    def _position(self, each: _Output) -> int:
        return each.index * self._request.num_choices + each.output.index

    async def _echoed(self, index: int, prompt_token_ids: Sequence[TokenId]) -> str:
        """Returns the text of a prompt that is to be repeated; empty where none is."""
        if not self._request.echo:
            return ""
        prompt = self._wanted[index].prompt
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return await self._desk.tokenization.decode(prompt_token_ids, skip_special_tokens=True)

    def _choice(
        self, each: _Output, state: _Written, prompt_logprobs: Sequence[TokenLogprobs], echoed: str
    ) -> dict[str, Any]:
        """`prompt_logprobs`: whole, if they are asked for."""
        output, request = each.output, self._request
        text, token_ids = echoed + output.text, list(output.token_ids)
        known: list[TokenLogprobs | None] = list(output.logprobs)
        if self._prompt_only:
            text, token_ids, known = echoed, [], []
        choice: dict[str, Any] = {
            "index": self._position(each),
            "text": text,
            "logprobs": None,
            "finish_reason": None if output.finish_reason is None else output.finish_reason.value,
            "stop_reason": output.matched_stop,
        }
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            if not state.begun:
                choice["prompt_token_ids"] = list(each.prompt_token_ids)
        if request.prompt_logprobs is not None and not state.begun:
            choice["prompt_logprobs"] = self._writer.prompt(prompt_logprobs)
        if request.logprobs is not None:
            if request.echo and not state.begun:
                known, token_ids = [None, *prompt_logprobs, *known], [*each.prompt_token_ids, *token_ids]
            choice["logprobs"] = self._writer.completion(token_ids, known, state.num_characters)
            state.num_characters += self._writer.num_characters(token_ids)
        state.begun = True
        return choice
