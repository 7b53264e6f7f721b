"""When things happened to one request, and what it used; becomes its last message's figures.

It listens at the same seam as metrics and traces (`tandem.telemetry.observers`).
Only the first prompt computation counts as queue and prefill; hand-offs of replays add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.clock import Clock
from tandem.telemetry.observers import RequestObserver


@dataclass(frozen=True, slots=True)
class Summary:
    """One request's figures; seconds as in inference.proto's Timings."""

    prompt_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    first_token_s: float
    total_s: float
    transfer_bytes: int


class Timeline(RequestObserver):
    """One request's times, on the clock given. Begins when it is made."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._arrived_s = clock.now_s()
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._queue_s: float | None = None
        self._prefill_s = 0.0
        self._transfer_s = 0.0
        self._transfer_bytes = 0

    @property
    def arrived_s(self) -> float:
        """When the request came, on the clock."""
        return self._arrived_s

    @property
    def total_s(self) -> float:
        """Arrival to the last token; to now, as long as none came."""
        return self._since_arrival_s() if self._first_token_s is None else self._last_token_s

    def tokens(self, num_tokens: int, index: int = 0) -> None:
        """New tokens are here."""
        self._last_token_s = self._since_arrival_s()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s

    def prompt_computed(self, queue_s: float, prefill_s: float) -> None:
        """A worker computed the prompt, begun `queue_s` after arrival."""
        if self._queue_s is None:
            self._queue_s = queue_s
            self._prefill_s = prefill_s

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        """The prompt's KV reached the decode worker."""
        self._transfer_bytes += num_bytes
        self._transfer_s += seconds

    def summary(self, prompt_tokens: int, completion_tokens: int) -> Summary:
        """The figures so far."""
        return Summary(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            queue_s=self._queue_s or 0.0,
            prefill_s=self._prefill_s,
            transfer_s=self._transfer_s,
            first_token_s=self._first_token_s or 0.0,
            total_s=self._last_token_s,
            transfer_bytes=self._transfer_bytes,
        )

    def _since_arrival_s(self) -> float:
        return self._clock.now_s() - self._arrived_s
