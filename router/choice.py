"""One choice: its tokens in order become text, until a stop string or the last token ends it."""

from __future__ import annotations

from dataclasses import dataclass

from router.detokenization import Detokenizer
from router.stop_strings import StopStrings
from tandem.types import FinishReason, TextParams, TokenDelta, TokenId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new of one choice. `logprobs` is empty or one per token."""

    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | TokenId | None = None
    """The caller's stop string, or its stop token id, that ended the choice."""


class Choice:
    """Feeds on contiguous deltas. After `finished` nothing more may be fed."""

    def __init__(self, detokenizer: Detokenizer, params: TextParams) -> None:
        self._detokenizer = detokenizer
        self._params = params
        self._stops = StopStrings(params.stop, include_stop=params.include_stop)
        self._num_tokens = 0
        self._finished = False

    @property
    def num_tokens(self) -> int:
        """Tokens given out."""
        return self._num_tokens

    @property
    def finished(self) -> bool:
        """Whether the delta given last was the choice's last."""
        return self._finished

    def feed(self, delta: TokenDelta) -> ChoiceDelta:
        """The text of `delta`. Ends at the token that completes a stop string; the rest is dropped."""
        text = ""
        for count, token_id in enumerate(delta.token_ids, start=1):
            piece = self._detokenizer.step(token_id)
            if not piece:
                continue
            scan = self._stops.feed(piece)
            text += scan.text
            if scan.matched is not None:
                return self._end(delta, count, text, FinishReason.STOP, scan.matched)
        if delta.finish_reason is None:
            self._num_tokens += len(delta.token_ids)
            return ChoiceDelta(text, delta.token_ids, delta.logprobs)
        return self._last(delta, text)

    def _last(self, delta: TokenDelta, text: str) -> ChoiceDelta:
        """The worker ended the choice: what was held back comes out."""
        count = len(delta.token_ids)
        scan = self._stops.feed(self._detokenizer.finish())
        text += scan.text
        if scan.matched is not None:
            return self._end(delta, count, text, FinishReason.STOP, scan.matched)
        text += self._stops.finish()
        last = delta.token_ids[-1] if delta.token_ids else None
        is_stop = delta.finish_reason is FinishReason.STOP and last in self._params.stop_token_ids
        return self._end(delta, count, text, delta.finish_reason, last if is_stop else None)

    def _end(
        self, delta: TokenDelta, count: int, text: str, reason: FinishReason | None, matched: str | TokenId | None
    ) -> ChoiceDelta:
        self._finished = True
        self._num_tokens += count
        return ChoiceDelta(text, delta.token_ids[:count], delta.logprobs[:count], reason, matched)
