"""Log-probabilities in the three shapes that callers know: of chats, of completions, and of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from router.tokenization import Tokenization
from tandem.types import TokenId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobsWriter:
    """Writes tokens as text, or as `token_id:N` where a caller wants that."""

    tokenization: Tokenization
    as_ids: bool = False

    def chat(self, logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Returns a choice's `logprobs` of a chat."""
        return {
            "content": [
                {**self._entry(each.token_id, each.logprob), "top_logprobs": [self._entry(*top) for top in each.top]}
                for each in logprobs
            ]
        }

    def completion(
        self, token_ids: Sequence[TokenId], logprobs: Sequence[TokenLogprobs | None], start: int = 0
    ) -> dict[str, Any]:
        """Returns a choice's `logprobs` of a completion; None = a token that nothing precedes.

        `start`: characters of the tokens before, for `text_offset`.
        """
        tokens = [self._text(each) for each in token_ids]
        lengths = (len(self._plain(each)) for each in token_ids)
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else each.logprob for each in logprobs],
            "top_logprobs": [None if each is None else self._alternatives(each) for each in logprobs],
            "text_offset": list(itertools.accumulate(lengths, initial=start))[: len(tokens)],
        }

    def num_characters(self, token_ids: Sequence[TokenId]) -> int:
        """Returns how many characters the tokens are, each by itself, as `text_offset` counts them."""
        return sum(len(self._plain(each)) for each in token_ids)

    def prompt(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """Returns vLLM's `prompt_logprobs`: None for the first token, then by token id."""
        return [None, *map(self._ranked, logprobs)]

    def _ranked(self, each: TokenLogprobs) -> dict[str, Any]:
        top = {
            str(token_id): {"logprob": value, "rank": rank, "decoded_token": self._plain(token_id)}
            for rank, (token_id, value) in enumerate(each.top, 1)
        }
        own = {"logprob": each.logprob, "rank": None, "decoded_token": self._plain(each.token_id)}
        return {str(each.token_id): own} | top

    def _alternatives(self, each: TokenLogprobs) -> dict[str, float]:
        return {self._text(token_id): value for token_id, value in (*each.top, (each.token_id, each.logprob))}

    def _entry(self, token_id: TokenId, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text(token_id),
            "logprob": logprob,
            "bytes": list(self.tokenization.token_bytes(token_id)),
        }

    def _text(self, token_id: TokenId) -> str:
        return f"token_id:{token_id}" if self.as_ids else self._plain(token_id)

    def _plain(self, token_id: TokenId) -> str:
        return self.tokenization.token_bytes(token_id).decode(errors="replace")
