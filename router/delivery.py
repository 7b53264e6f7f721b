"""The way out of a request: tokens of its choices in, in any order; ordered tokens and their text out.

    push(TokenDelta) ─▶ ChoiceStream: order → text → stop strings → not read yet ─▶ get() ─▶ ChoiceOutput

Tokens come from two workers: the first ones from prefill, the rest from decode, and decode's second may
overtake prefill's first. After a replay a new pair may repeat what is known. What waits for a slow reader is
merged per choice, so nothing upstream waits; `unread` ends a request of which too much waits, or for too long.
Filled without awaiting, from within a worker's stream; read by the face's own task. Knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.metrics import Summary
from router.prompt_logprobs import PromptLogprobs
from router.text import Detokenizer, StopStrings
from tandem.errors import InvalidOutput, TandemError
from tandem.telemetry.observers import RequestObserver
from tandem.types import ChoiceSpec, FinishReason, TextParams, TokenDelta, TokenId, TokenLogprobs

_MAX_OUTPUT_WEIGHT = 4096
"""Of one output, 16 to 50 KB on the wire: what is being written cannot be dropped any more. An answer that was asked
for as a whole is one output."""
_BYTES_PER_WEIGHT = 100
"""Memory of a token with its text, and about that of a log-probability."""


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """What is new of one choice since its last output. `logprobs` is empty or one per token."""

    index: int
    """Which choice."""
    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the choice's last output."""
    matched_stop: str | TokenId | None = None
    """The caller's stop string, or its stop token id, that ended the choice."""
    summary: Summary | None = None
    """Set on the request's last output."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the request, from the prompt's second token on: in outputs of their own before the first token; of an answer
    that is read as a whole, in the first choice's."""
    score: float | None = None
    """Set with the finish reason of a choice that a beam search found."""


class ChoiceStream:
    """One choice: its tokens in order, their text, and what is not read yet. Push nothing once it is finished."""

    def __init__(
        self, index: int, detokenizer: Detokenizer, params: TextParams, check: Callable[[TokenDelta], None]
    ) -> None:
        """`check` raises InvalidOutput for what cannot be tokens of this choice, as `TokenRules` does."""
        self.index = index
        self._check = check
        self._detokenizer = detokenizer
        self._params = params
        self._stops = StopStrings(params.stop, include_stop=params.include_stop) if params.stop else None
        self._token_ids: list[TokenId] = []
        self._early: dict[int, TokenDelta] = {}
        """By offset: what overtook the tokens before it."""
        self.finish_reason: FinishReason | None = None
        """Set with the last token."""
        self._matched_stop: str | TokenId | None = None
        self._score: float | None = None
        self._num_read = 0
        self._unread_text: list[str] = []
        """One per token, and after the last what was held back."""
        self._unread_logprobs: list[TokenLogprobs] = []
        self._logprobs_per_token = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in order."""
        return len(self._token_ids)

    @property
    def unread_weight(self) -> int:
        """Tokens and log-probabilities that are not read yet."""
        return (len(self._token_ids) - self._num_read) * (1 + self._logprobs_per_token)

    @property
    def spec(self) -> ChoiceSpec:
        """As a worker is to resume it."""
        return ChoiceSpec(self.index, tuple(self._token_ids))

    def push(self, delta: TokenDelta) -> int:
        """Takes tokens in any order, known ones again too; returns how many new ones are now in order.

        Raises InvalidOutput, and takes nothing, if they cannot be this choice's tokens.
        """
        self._check(delta)
        if delta.offset < len(self._token_ids):
            self._check_known(delta)
        if delta.offset > len(self._token_ids):
            waiting = self._early.get(delta.offset)
            if waiting is None or len(delta.token_ids) >= len(waiting.token_ids):
                self._early[delta.offset] = delta
            return 0
        num_new = self._accept(delta)
        while self._early and self.finish_reason is None:
            offset = min(self._early)
            if offset > len(self._token_ids):
                break
            num_new += self._accept(self._early.pop(offset))
        return num_new

    def forget_early(self) -> None:
        """Drops what came out of order, from a pair of workers that will not fill the gap."""
        self._early.clear()

    def read(self, summary: Summary | None, max_tokens: int | None = None) -> ChoiceOutput:
        """All that is new, or the next `max_tokens` of it; `summary` goes with the last."""
        unread = self._token_ids[self._num_read :]
        count = len(unread) if max_tokens is None else min(len(unread), max_tokens)
        is_last = count == len(unread)
        output = ChoiceOutput(
            index=self.index,
            text="".join(self._unread_text if is_last else self._unread_text[:count]),
            token_ids=tuple(unread[:count]),
            logprobs=tuple(self._unread_logprobs[:count]),
            finish_reason=self.finish_reason if is_last else None,
            matched_stop=self._matched_stop if is_last else None,
            score=self._score if is_last and self.finish_reason is not None else None,
            summary=summary if is_last else None,
        )
        self._num_read += count
        self._unread_text = [] if is_last else self._unread_text[count:]
        self._unread_logprobs = self._unread_logprobs[count:]
        return output

    def read_some(self, summary: Summary | None) -> ChoiceOutput:
        """As `read`, as much as an output holds."""
        return self.read(summary, max(1, _MAX_OUTPUT_WEIGHT // (1 + self._logprobs_per_token)))

    def drop_unread(self) -> None:
        """Nobody will read it."""
        self._num_read = len(self._token_ids)
        self._unread_text, self._unread_logprobs = [], []

    def _check_known(self, delta: TokenDelta) -> None:
        known = tuple(self._token_ids[delta.offset : delta.end])
        if known != delta.token_ids[: len(known)]:
            raise InvalidOutput(f"other tokens from {delta.offset} on than were told before")

    def _accept(self, delta: TokenDelta) -> int:
        """Takes what of `delta` is not known, where it leaves no gap."""
        num_known = len(self._token_ids) - delta.offset
        token_ids = delta.token_ids[num_known:] if num_known else delta.token_ids
        if num_known > len(delta.token_ids) or not (token_ids or delta.finish_reason):
            return 0
        count, matched = self._detokenize(token_ids)
        self._token_ids += token_ids[:count]
        if delta.logprobs:
            self._unread_logprobs += delta.logprobs[num_known : num_known + count]
            self._logprobs_per_token = 1 + len(delta.logprobs[0].top)
        self._score = delta.score
        if matched is None and delta.finish_reason is not None:
            matched = self._flush()
            self.finish_reason = delta.finish_reason
            if matched is None and delta.finish_reason is FinishReason.STOP and token_ids:
                self._matched_stop = token_ids[-1] if token_ids[-1] in self._params.stop_token_ids else None
        if matched is not None:
            self.finish_reason, self._matched_stop = FinishReason.STOP, matched
        return count

    def _detokenize(self, token_ids: Sequence[TokenId]) -> tuple[int, str | None]:
        """Adds their text; returns how many belong to the choice, and the stop string that ends it with the last."""
        for count, token_id in enumerate(token_ids, start=1):
            matched = self._add_text(self._detokenizer.step(token_id))
            if matched is not None:
                return count, matched
        return len(token_ids), None

    def _flush(self) -> str | None:
        """Adds the text that was held back; the stop string that it completed."""
        matched = self._add_text(self._detokenizer.finish())
        if matched is None and self._stops is not None:
            self._unread_text.append(self._stops.finish())
        return matched

    def _add_text(self, piece: str) -> str | None:
        """The stop string that `piece` completed."""
        if not piece or self._stops is None:
            self._unread_text.append(piece)
            return None
        text, matched = self._stops.feed(piece)
        self._unread_text.append(text)
        return matched


class Delivery:
    """All choices of one request. Single-threaded; at most one reader.

    A choice's last output tells its finish reason; the request's last one leaves together with the summary.
    """

    def __init__(
        self,
        choices: Sequence[ChoiceStream],
        observer: RequestObserver,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """`prompt_logprobs`, if they are asked for, as yet without any."""
        self._prompt_logprobs = prompt_logprobs
        self._choices = {choice.index: choice for choice in choices}
        self._observer = observer
        self._open = dict(self._choices)
        """Those without their last token."""
        self._unread: dict[int, ChoiceStream] = {}
        """By index, in the order in which they came to have something new."""
        self._summary: Summary | None = None
        self._error: TandemError | None = None
        self._news: asyncio.Future[None] | None = None
        self.num_outputs = 0
        """Read so far."""
        self._written_weight = 0
        """Of the output that was read last, until the next is asked for."""

    @property
    def being_written(self) -> bool:
        """Whether the reader has an output that has not left yet."""
        return self._written_weight > 0

    @property
    def unread_bytes(self) -> int:
        """About the memory of what has not left yet."""
        unread = self._prompt_weight + sum(each.unread_weight for each in self._choices.values())
        return (unread + self._written_weight) * _BYTES_PER_WEIGHT

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether workers are still to tell some."""
        return self._prompt_logprobs is not None and not self._prompt_logprobs.is_complete

    @property
    def finished(self) -> bool:
        """Whether every choice has its last token."""
        return not self._open

    @property
    def open_choices(self) -> tuple[ChoiceSpec, ...]:
        """Those not finished, as workers are to resume them."""
        return tuple(each.spec for each in self._open.values())

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """Of the choices that are finished, by index."""
        return tuple(each.finish_reason for each in self._choices.values() if each.finish_reason is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens in order, over all choices."""
        return sum(each.num_tokens for each in self._choices.values())

    def num_tokens_of(self, index: int) -> int:
        """Tokens in order of one choice."""
        return self._choices[index].num_tokens

    def push_prompt_logprobs(self, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Takes those of the prompt's tokens from `offset` on, known ones again too. Raises InvalidOutput as `push`."""
        if self._prompt_logprobs is None:
            raise InvalidOutput("log-probabilities of a prompt, which nobody asked for")
        self._prompt_logprobs.push(offset, logprobs)
        if self._open:  # else nobody waits for them any more
            self._wake()

    def push(self, delta: TokenDelta) -> None:
        """Takes tokens from a worker. Those of a finished choice, which workers cannot stop alone, are dropped.

        Raises InvalidOutput, and takes nothing, if they cannot be this request's tokens.
        """
        choice = self._open.get(delta.index)
        if choice is None:
            if delta.index not in self._choices:
                raise InvalidOutput(f"tokens of choice {delta.index}, which nobody asked for")
            return
        if delta.offset == 0 and self.lacks_prompt_logprobs:
            raise InvalidOutput("a first token before all log-probabilities of the prompt")
        num_new = choice.push(delta)
        if num_new:
            self._observer.tokens(num_new, delta.index)
        if choice.finish_reason is not None:
            del self._open[delta.index]
        elif not num_new:
            return
        self._unread[delta.index] = choice
        if self._open:  # else the last output waits for the summary
            self._wake()

    def forget_early(self) -> None:
        """Drops what came out of order, from a pair of workers that will not fill the gaps."""
        for choice in self._choices.values():
            choice.forget_early()

    def close(self, summary: Summary) -> None:
        """The request ended well."""
        self._summary = summary
        self._wake()

    def fail(self, error: TandemError) -> None:
        """The request ended badly; what waits is still read before the error."""
        self._error = error
        self._wake()

    def abandon(self, error: TandemError) -> None:
        """It is not read: what waits is dropped, and the reader finds nothing but `error`."""
        for choice in self._choices.values():
            choice.drop_unread()
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.drop_unread()
        self._unread.clear()
        self._open.clear()
        self._summary = None
        self.fail(error)

    async def get(self) -> ChoiceOutput:
        """What is new of one choice, once there is something. Raises what `fail` was given, after the rest."""
        self._written_weight = 0
        while True:
            if self._prompt_weight:
                return self._read_prompt_logprobs()
            is_held = not self._open and self._summary is None and self._error is None
            if self._unread and not is_held:
                return self._read_next()
            if self._error is not None and self._summary is None:
                raise self._error
            await self._wait()

    async def get_all(self) -> tuple[ChoiceOutput, ...]:
        """Every choice by index, whole, once the request has ended. Raises what `fail` was given."""
        while self._summary is None:
            if self._error is not None:
                raise self._error
            await self._wait()
        self._written_weight = 1 + self._prompt_weight + sum(each.unread_weight for each in self._choices.values())
        *others, last = sorted(self._unread)
        self._unread, unread = {}, self._unread
        first, *rest = (*(unread[index].read(None) for index in others), unread[last].read(self._summary))
        prompt = () if self._prompt_logprobs is None else self._prompt_logprobs.read()
        return (replace(first, prompt_logprobs=prompt), *rest)

    @property
    def _prompt_weight(self) -> int:
        return 0 if self._prompt_logprobs is None else self._prompt_logprobs.unread_weight

    def _read_prompt_logprobs(self) -> ChoiceOutput:
        assert self._prompt_logprobs is not None
        before = self._prompt_weight
        prompt = self._prompt_logprobs.read(_MAX_OUTPUT_WEIGHT)
        self.num_outputs += 1
        self._written_weight = 1 + before - self._prompt_weight
        return ChoiceOutput(min(self._choices), "", (), prompt_logprobs=prompt)

    def _read_next(self) -> ChoiceOutput:
        """Of the choice that has waited longest."""
        index, choice = next(iter(self._unread.items()))
        del self._unread[index]
        before = choice.unread_weight
        output = choice.read_some(None if self._unread else self._summary)
        if choice.unread_weight:
            self._unread[index] = choice
        self.num_outputs += 1
        self._written_weight = 1 + before - choice.unread_weight
        return output

    async def _wait(self) -> None:
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
