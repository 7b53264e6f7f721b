"""One streamed request as its client saw it, and what streams together say; the client of Tandem's servers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from tandem.client import AsyncClient
from tandem.types import TokenId

REQUEST_TIMEOUT_S = 90.0

Prompt = tuple[int, ...]
OnFirst = Callable[[], None]
"""Called when the first token is here."""


class MissingTokens(Exception):
    """A stream ended before all of its tokens."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Times are the client's, of `time.perf_counter`."""

    sent_s: float
    arrivals: tuple[tuple[float, int], ...]
    """When each message with tokens came, and how many it brought."""
    token_ids: Prompt = ()
    """What was generated."""
    cached_tokens: int = 0
    """Of the prompt: what the server says that it found in its cache."""
    transfer_bytes: int = 0
    """KV that was handed from worker to worker."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals[0][0] - self.sent_s

    @property
    def end_s(self) -> float:
        """When the last token came."""
        return self.arrivals[-1][0]

    def gaps_s(self, start_s: float = float("-inf"), end_s: float = float("inf")) -> list[float]:
        """What a reader waited between messages; of those gaps that reach into the window."""
        times = [at_s for at_s, _ in self.arrivals]
        return [now - before for before, now in pairwise(times) if now >= start_s and before <= end_s]


class Arrivals:
    """Notes when tokens come, from now on."""

    def __init__(self, on_first: OnFirst | None) -> None:
        self._sent_s = time.perf_counter()
        self._arrivals: list[tuple[float, int]] = []
        self._token_ids: list[int] = []
        self._on_first = on_first

    def add(self, token_ids: Sequence[int]) -> None:
        """A message with these tokens is here; one with none does not count."""
        if not token_ids:
            return
        self._token_ids += token_ids
        self._arrivals.append((time.perf_counter(), len(token_ids)))
        if self._on_first is not None and len(self._arrivals) == 1:
            self._on_first()

    def stream(self, max_tokens: int, cached_tokens: int = 0, transfer_bytes: int = 0) -> Stream:
        """What was seen. Raises MissingTokens if there are fewer."""
        stream = Stream(self._sent_s, tuple(self._arrivals), tuple(self._token_ids), cached_tokens, transfer_bytes)
        if stream.num_tokens != max_tokens:
            raise MissingTokens(f"the stream ended after {stream.num_tokens} of {max_tokens} tokens")
        return stream


class StreamClient(Protocol):
    """A client of one server."""

    async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
        """Greedy, end-of-text ignored. Raises if not all tokens come in time."""
        ...


class TandemStreams:
    """Through gRPC, as users would."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
        """See StreamClient. Raises TandemError, MissingTokens."""
        arrivals = Arrivals(on_first)
        updates = self._client.generate(
            token_ids=[TokenId(token_id) for token_id in prompt],
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=REQUEST_TIMEOUT_S,
        )
        cached_tokens = transfer_bytes = 0
        async for update in updates:
            arrivals.add(update.token_ids)
            if update.usage is not None and update.timings is not None:  # the last one
                cached_tokens, transfer_bytes = update.usage.cached_tokens, update.timings.transfer_bytes
        return arrivals.stream(max_tokens, cached_tokens, transfer_bytes)


def tokens_per_s(streams: Sequence[Stream]) -> float:
    """Output tokens of all of them over first sent to last arrived."""
    span_s = max(stream.end_s for stream in streams) - min(stream.sent_s for stream in streams)
    return sum(stream.num_tokens for stream in streams) / span_s


def fresh_prompts(rng: random.Random, count: int, num_tokens: int, vocab_size: int) -> list[Prompt]:
    """Random ids that no prefix cache has seen."""
    return [tuple(rng.randrange(4, vocab_size) for _ in range(num_tokens)) for _ in range(count)]
