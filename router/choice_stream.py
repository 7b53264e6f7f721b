"""One choice on its way out: tokens in any order in; its tokens in order, their text, and what is not read yet.

    push(TokenDelta) ─▶ order → text → stop strings → not read yet ─▶ read() ─▶ ChoiceOutput

Nearly every token comes alone and is read alone: for these there are short ways, which do what the long ones do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.metrics import Summary
from router.text import Detokenizer, StopStrings
from tandem.errors import InvalidOutput
from tandem.types import (
    ChoiceSpec,
    FinishReason,
    SamplingParams,
    TextParams,
    TokenDelta,
    TokenId,
    TokenLogprobs,
)

MAX_OUTPUT_WEIGHT = 4096
"""Most weight of one output, 16 to 50 KB on the wire: an output that is being written cannot be dropped. An answer that
is asked for as a whole is one output."""
_BARE: tuple[tuple[TokenLogprobs, ...], FinishReason | None] = ((), None)
"""Log-probabilities and finish reason of a TokenDelta that has neither."""
_NOTHING_MORE = ((), None, None, None, (), None)
"""All fields of a ChoiceOutput behind its tokens, in one that has no more."""


class ChoiceOutput(NamedTuple):
    """What is new of one choice since its last output. `logprobs` is empty or one per token.

    A tuple, as TokenDelta is: most hold one token.
    """

    index: int  # type: ignore[assignment]  # in place of a method that nobody calls
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
    """Log-probabilities of the prompt from its second token on: in outputs before the first token; in an answer that is
    read as a whole, in the first choice's output."""
    score: float | None = None
    """Set with the finish reason of a choice that a beam search found."""

    @property
    def is_plain(self) -> bool:
        """Whether the output has text and tokens alone."""
        return self[3:] == _NOTHING_MORE


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
        """Deltas that overtook the tokens before them, by offset."""
        self.finish_reason: FinishReason | None = None
        """Set with the last token."""
        self._matched_stop: str | TokenId | None = None
        self._score: float | None = None
        self._num_read = 0
        self._unread_text: list[str] = []
        """A text per token; the last text may be what was held back."""
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
        """The choice as workers resume choices."""
        return ChoiceSpec(self.index, tuple(self._token_ids))

    def push(self, delta: TokenDelta) -> int:
        """Takes tokens in any order, known ones again too; returns how many new ones are now in order.

        Raises InvalidOutput, and takes nothing, if they cannot be this choice's tokens.
        """
        self._check(delta)
        if self._is_next(delta):
            token_id = delta.token_ids[0]
            self._token_ids.append(token_id)
            self._unread_text.append(self._detokenizer.step(token_id))
            return 1
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
        if len(self._unread_text) == 1 and not self._unread_logprobs and self.finish_reason is None:
            text, self._unread_text, self._num_read = self._unread_text[0], [], len(self._token_ids)
            return ChoiceOutput(self.index, text, (self._token_ids[-1],), summary=summary)
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
        return self.read(summary, max(1, MAX_OUTPUT_WEIGHT // (1 + self._logprobs_per_token)))

    def drop_unread(self) -> None:
        """Drops what is unread: no reader will come."""
        self._num_read = len(self._token_ids)
        self._unread_text, self._unread_logprobs = [], []

    def _is_next(self, delta: TokenDelta) -> bool:
        """Whether it is what nearly all are: the next token alone, of a choice that goes on whatever its text."""
        return (
            delta.offset == len(self._token_ids)
            and len(delta.token_ids) == 1
            and not (delta.logprobs or self._early or self._stops)
            and delta.finish_reason is None
            and delta.score is None
        )

    def _check_known(self, delta: TokenDelta) -> None:
        known = tuple(self._token_ids[delta.offset : delta.end])
        if known != delta.token_ids[: len(known)]:
            raise InvalidOutput(f"other tokens from {delta.offset} on than were told before")

    def _accept(self, delta: TokenDelta) -> int:
        """Takes the unknown part of `delta`, if no gap lies before that part."""
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


class TokenRules:
    """What can be true of the tokens that a worker sends for a request: the router believes nothing else.

    Checked once per message: ids and their number, and that a choice ends where its worker must end it
    (`engine.sequence`), no sooner and no later. Whether a token is the right one, no router can tell.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._max_tokens = sampling.max_tokens
        self._end_token_ids = sampling.end_token_ids
        self._num_logprobs = sampling.logprobs
        self._has_scores = sampling.beam_width > 0

    def check(self, delta: TokenDelta) -> None:
        """Raises InvalidOutput for what cannot be true of a choice, whatever came before."""
        if self._is_bare(delta):
            return
        token_ids = delta.token_ids
        last, num_tokens = token_ids[-1], delta.offset + len(token_ids)
        if num_tokens > self._max_tokens:
            raise InvalidOutput(f"tokens up to {num_tokens} of at most {self._max_tokens}")
        due = FinishReason.STOP if last in self._end_token_ids else None
        if due is None and num_tokens == self._max_tokens:
            due = FinishReason.LENGTH
        if delta.finish_reason is not due:
            raise InvalidOutput(f"finish reason {delta.finish_reason} instead of {due} after {num_tokens} tokens")
        if (delta.score is not None) is not self._has_scores or not math.isfinite(delta.score or 0.0):
            raise InvalidOutput(f"score {delta.score} of a choice that has {'one' if self._has_scores else 'none'}")
        if len(token_ids) > 1:
            _check_vocabulary(max(token_ids), self._vocab_size)
            if not self._end_token_ids.isdisjoint(token_ids[:-1]):
                raise InvalidOutput("tokens behind the one that ends the choice")
        else:
            _check_vocabulary(last, self._vocab_size)
        if self._num_logprobs is not None or delta.logprobs:
            self._check_logprobs(delta)

    def _is_bare(self, delta: TokenDelta) -> bool:
        """Whether it is what nearly all are, and nothing is wrong with it: one token, behind which more follow."""
        if delta[2:4] != _BARE or len(delta.token_ids) != 1:
            return False
        (token_id,) = delta.token_ids
        goes_on = delta.offset + 1 < self._max_tokens and token_id not in self._end_token_ids
        is_plain = self._num_logprobs is None and not self._has_scores and delta.score is None
        return goes_on and is_plain and token_id < self._vocab_size

    def _check_logprobs(self, delta: TokenDelta) -> None:
        if self._num_logprobs is None or tuple(each.token_id for each in delta.logprobs) != delta.token_ids:
            raise InvalidOutput("log-probabilities that are not of its tokens")
        for each in delta.logprobs:
            _check_top(each, self._num_logprobs, self._vocab_size)


def _check_top(logprobs: TokenLogprobs, num_top: int, vocab_size: int) -> None:
    """Raises InvalidOutput if one position names too many of the best tokens, or one that there is not."""
    if len(logprobs.top) > num_top:
        raise InvalidOutput(f"log-probabilities of {len(logprobs.top)} tokens instead of {num_top}")
    _check_vocabulary(max((token_id for token_id, _ in logprobs.top), default=TokenId(0)), vocab_size)


def _check_vocabulary(highest: TokenId, vocab_size: int) -> None:
    if highest >= vocab_size:
        raise InvalidOutput(f"a token beyond the vocabulary of {vocab_size}")


class PromptLogprobs:
    """A request's log-probabilities of its prompt, from the second token on, as workers send them, until they are read.

    A pair of workers that takes over sends them again from the start; what is known is dropped. Nothing of a choice may
    come before they are complete, so a reader has them all before the first token.
    """

    def __init__(self, prompt_token_ids: Sequence[TokenId], num_top: int, vocab_size: int) -> None:
        """`num_top`: how many of the best tokens each may name."""
        self._prompt_token_ids = prompt_token_ids
        self._num_top = num_top
        self._vocab_size = vocab_size
        self._num_known = 1
        self._unread: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        """Whether every token has its own."""
        return self._num_known >= len(self._prompt_token_ids)

    @property
    def has_begun(self) -> bool:
        """Whether a worker has sent any."""
        return self._num_known > 1

    @property
    def unread_weight(self) -> int:
        """Tokens and log-probabilities that are not read yet."""
        return len(self._unread) * (1 + self._num_top)

    def push(self, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Takes those of tokens `offset, offset + 1, …`. Raises InvalidOutput, and takes nothing, if they cannot be."""
        told = tuple(each.token_id for each in logprobs)
        if not 1 <= offset <= self._num_known:
            raise InvalidOutput(f"log-probabilities of the prompt from {offset} on, after {self._num_known - 1}")
        if not told or told != tuple(self._prompt_token_ids[offset : offset + len(told)]):
            raise InvalidOutput("log-probabilities that are not of the prompt's tokens")
        for each in logprobs:
            _check_top(each, self._num_top, self._vocab_size)
        new = logprobs[self._num_known - offset :]
        self._unread += new
        self._num_known += len(new)

    def read(self, max_weight: int | None = None) -> tuple[TokenLogprobs, ...]:
        """Returns the next unread log-probabilities: all, or as many as `max_weight` allows, one at least."""
        count = len(self._unread) if max_weight is None else max(1, max_weight // (1 + self._num_top))
        read, self._unread = self._unread[:count], self._unread[count:]
        return tuple(read)

    def drop_unread(self) -> None:
        """Drops what is unread: no reader will come."""
        self._unread = []
