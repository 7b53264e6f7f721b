"""One request's log-probabilities of its prompt: as workers tell them, until they are read.

A pair of workers that takes over tells them again from the start; what is known is dropped. Nothing of a choice may be
told before they are complete, so a reader has them all before the first token.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.token_rules import check_top
from tandem.errors import InvalidOutput
from tandem.types import TokenId, TokenLogprobs


class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from the second on: the first has none."""

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
            check_top(each, self._num_top, self._vocab_size)
        new = logprobs[self._num_known - offset :]
        self._unread += new
        self._num_known += len(new)

    def read(self, max_weight: int | None = None) -> tuple[TokenLogprobs, ...]:
        """All that is not read, or as much as weighs so much."""
        count = len(self._unread) if max_weight is None else max(1, max_weight // (1 + self._num_top))
        read, self._unread = self._unread[:count], self._unread[count:]
        return tuple(read)

    def drop_unread(self) -> None:
        """Drops what is unread: no reader will come."""
        self._unread = []
