"""What can be true of the tokens that a worker tells: the router believes nothing else.

Checked once per message, where it enters: ids and their number, and that a choice ends where its worker must end
it (`engine.sequence`), no sooner and no later. Whether a token is the right one, no router can tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.errors import InvalidOutput
from tandem.types import FinishReason, SamplingParams, TokenDelta, TokenId, TokenLogprobs

_BARE: tuple[tuple[TokenLogprobs, ...], FinishReason | None] = ((), None)
"""Log-probabilities and finish reason of a TokenDelta that has neither."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules for every choice of a request."""

    vocab_size: int
    max_tokens: int
    end_token_ids: frozenset[TokenId]
    num_logprobs: int | None
    """How many tokens each position's log-probabilities name; None = none were asked for."""
    has_scores: bool = False
    """Whether every output comes with its choice's score, as what a beam search found does."""

    @classmethod
    def of(cls, sampling: SamplingParams, vocab_size: int) -> TokenRules:
        """Returns the rules of a request with `sampling`."""
        has_scores = sampling.beam_width > 0
        return cls(vocab_size, sampling.max_tokens, sampling.end_token_ids, sampling.logprobs, has_scores)

    def check(self, delta: TokenDelta) -> None:
        """Raises InvalidOutput for what cannot be true of a choice, whatever came before."""
        if self._is_bare(delta):
            return
        token_ids = delta.token_ids
        last, num_tokens = token_ids[-1], delta.offset + len(token_ids)
        if num_tokens > self.max_tokens:
            raise InvalidOutput(f"tokens up to {num_tokens} of at most {self.max_tokens}")
        due = FinishReason.STOP if last in self.end_token_ids else None
        if due is None and num_tokens == self.max_tokens:
            due = FinishReason.LENGTH
        if delta.finish_reason is not due:
            raise InvalidOutput(f"finish reason {delta.finish_reason} instead of {due} after {num_tokens} tokens")
        if (delta.score is not None) is not self.has_scores or not math.isfinite(delta.score or 0.0):
            raise InvalidOutput(f"score {delta.score} of a choice that has {'one' if self.has_scores else 'none'}")
        if len(token_ids) > 1:
            self._check_vocabulary(max(token_ids))
            if not self.end_token_ids.isdisjoint(token_ids[:-1]):
                raise InvalidOutput("tokens behind the one that ends the choice")
        else:
            self._check_vocabulary(last)
        if self.num_logprobs is not None or delta.logprobs:
            self._check_logprobs(delta)

    def _is_bare(self, delta: TokenDelta) -> bool:
        """Whether it is what nearly all are, and nothing is wrong with it: one token, behind which more follow."""
        if delta[2:4] != _BARE or len(delta.token_ids) != 1:
            return False
        (token_id,) = delta.token_ids
        goes_on = delta.offset + 1 < self.max_tokens and token_id not in self.end_token_ids
        is_plain = self.num_logprobs is None and not self.has_scores and delta.score is None
        return goes_on and is_plain and token_id < self.vocab_size

    def _check_logprobs(self, delta: TokenDelta) -> None:
        if self.num_logprobs is None or tuple(each.token_id for each in delta.logprobs) != delta.token_ids:
            raise InvalidOutput("log-probabilities that are not of its tokens")
        for each in delta.logprobs:
            check_top(each, self.num_logprobs, self.vocab_size)

    def _check_vocabulary(self, highest: TokenId) -> None:
        _check_vocabulary(highest, self.vocab_size)


def check_top(logprobs: TokenLogprobs, num_top: int, vocab_size: int) -> None:
    """Raises InvalidOutput if one position names too many of the best tokens, or one that there is not."""
    if len(logprobs.top) > num_top:
        raise InvalidOutput(f"log-probabilities of {len(logprobs.top)} tokens instead of {num_top}")
    _check_vocabulary(max((token_id for token_id, _ in logprobs.top), default=TokenId(0)), vocab_size)


def _check_vocabulary(highest: TokenId, vocab_size: int) -> None:
    if highest >= vocab_size:
        raise InvalidOutput(f"a token beyond the vocabulary of {vocab_size}")
