"""What every handler of the HTTP faces works with: the entrance, the served model, and one choice's parsed answer."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from models.files.checkpoint import CheckpointInfo
from router.choice_stream import ChoiceOutput
from router.entrance import Entrance, RunningRequest
from router.faces.openai.tools import Choice, Tools
from router.faces.parsers.formats import AnswerFormat
from router.faces.parsers.parts import AnswerParser, CallBegan, Part
from router.metrics import Summary
from router.request import Caller
from router.status import RouterStatus
from router.tokenization import Tokenization
from shell.http.server import Call
from tandem.errors import InvalidRequest
from tandem.types import FinishReason

REQUEST_ID = "X-Request-Id"
"""Header with the id of a request, either way."""
TIMEOUT = "X-Request-Timeout"
"""Header with the seconds that a caller waits for the whole answer."""
_PROMPT_END_TOKENS = 16
"""As many hold the words by which a template begins the assistant's turn."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Parts of the router that handlers use."""

    checkpoint: CheckpointInfo
    tokenization: Tokenization
    entrance: Entrance
    status: RouterStatus
    answers: AnswerFormat
    """How the model writes calls of tools and reasoning."""
    started: datetime
    """Time at which the router began."""

    @property
    def model(self) -> str:
        """Returns the name of the served model."""
        return self.checkpoint.name

    def caller(self, call: Call) -> Caller:
        """Returns who asks. Raises InvalidRequest for a timeout that is none."""
        given = call.request.headers.get(TIMEOUT)
        try:
            timeout_s = None if given is None else float(given)
        except ValueError:
            timeout_s = math.nan
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise InvalidRequest(TIMEOUT, "must be seconds above 0")
        return Caller(timeout_s, call.traceparent, call.tracestate, call.peer, call.identity.max_priority)

    def request_id(self, call: Call, given: str | None = None) -> str:
        """Returns the id that a caller gives a request, in its body or in a header; empty = none."""
        return given if given else call.request.headers.get(REQUEST_ID, "")

    def needs_special_tokens(self, tools: Tools) -> bool:
        """Whether an answer must be read with the text of special tokens, which marks of calls and reasoning may be."""
        looks_for_marks = tools.choice is Choice.AUTO or (tools.choice is Choice.NONE and self.answers.marks_reasoning)
        return self.answers.has_special_marks and looks_for_marks

    async def choice_readers(
        self, running: RunningRequest, num_choices: int, tools: Tools, *, keeps_end: bool
    ) -> list[ChoiceReader]:
        """Returns a reader per choice. `keeps_end`: the caller wants the text of the token that ends it."""
        end = running.prompt_token_ids[-_PROMPT_END_TOKENS:]
        prompt_end = await self.tokenization.decode(end, skip_special_tokens=False)
        cuts = self.needs_special_tokens(tools) and not keeps_end
        tokenization = self.tokenization if cuts else None
        return [ChoiceReader(tools.parser(self.answers, prompt_end), tokenization) for _ in range(num_choices)]


class ChoiceReader:
    """One choice's outputs, taken apart."""

    def __init__(self, parser: AnswerParser, tokenization: Tokenization | None = None) -> None:
        """`tokenization`: the text of the token that ends the choice is to be cut off."""
        self._parser = parser
        self._tokenization = tokenization
        self.called = False
        """Whether a call of a tool has begun."""

    def read(self, output: ChoiceOutput) -> list[Part]:
        """Returns what an output adds; after the choice's last output, all that was held back."""
        text = output.text
        ends = output.finish_reason is not None
        if self._tokenization is not None and output.finish_reason is FinishReason.STOP and output.token_ids:
            text = text.removesuffix(self._tokenization.token_bytes(output.token_ids[-1]).decode(errors="replace"))
        parts = self._parser.feed(text)
        if ends:
            parts += self._parser.finish()
        self.called = self.called or any(isinstance(part, CallBegan) for part in parts)
        return parts

    def finish_reason(self, output: ChoiceOutput) -> str:
        """Returns the finish reason of the choice's last output, in OpenAI's words."""
        assert output.finish_reason is not None
        return "tool_calls" if self.called and output.finish_reason is FinishReason.STOP else output.finish_reason.value


async def outputs(running: RunningRequest) -> AsyncIterator[ChoiceOutput]:
    """Yields all outputs of a request. Raises what ends it otherwise."""
    while True:
        output = await running.delivery.get()
        yield output
        if output.summary is not None:
            return


def usage(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Returns OpenAI's usage of one or more requests."""
    prompt = sum(each.prompt_tokens for each in summaries)
    completion = sum(each.completion_tokens for each in summaries)
    cached = sum(each.cached_tokens for each in summaries)
    return {**usage_so_far(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}


def usage_so_far(prompt: int, completion: int) -> dict[str, Any]:
    """Returns OpenAI's usage of a request under way, by its tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
