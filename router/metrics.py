"""What happens to requests on the router, counted for metrics, and timed for the request's own last message.

Latencies count from arrival. A replayed request is one request: only the first computation of
its prompt counts, and the gap in which it moved is an inter-token gap like any other. Inter-token gaps
are those within a choice; the first one of a choice counts from the request's first token.
"""

from __future__ import annotations

from dataclasses import dataclass

from shell.clock import Clock
from shell.telemetry import metric_names as names
from shell.telemetry.metrics import Metrics
from shell.telemetry.observers import RequestEnd, RequestObserver, RequestStart, RouterObserver
from shell.telemetry.recent_latencies import RecentLatencies
from shell.telemetry.trace_context import sampled_trace_id_of
from tandem.errors import TandemError
from tandem.types import FinishReason, PlacementReason, PrefixAt, WorkerInfo


class RouterMetrics(RouterObserver):
    """Does not decide the trace context of workers' spans: give it after an observer that does."""

    def __init__(self, metrics: Metrics, recent: RecentLatencies, clock: Clock) -> None:
        self.clock = clock
        self.recent = recent
        self.requests = metrics.counter(names.REQUESTS)
        self.failures = metrics.counter(names.REQUEST_FAILURES)
        self.refusals = metrics.counter(names.REQUESTS_REFUSED)
        self.placements = metrics.counter(names.PLACEMENTS)
        self.placement_reasons = metrics.counter(names.PLACEMENT_REASONS)
        self.prefix_placements = metrics.counter(names.PREFIX_PLACEMENTS)
        self.moves = metrics.counter(names.REQUEST_MOVES)
        self.prompt_tokens = metrics.counter(names.PROMPT_TOKENS)
        self.cached_tokens = metrics.counter(names.CACHED_PROMPT_TOKENS)
        self.completion_tokens = metrics.counter(names.COMPLETION_TOKENS)
        self.first_token_s = metrics.histogram(names.TIME_TO_FIRST_TOKEN)
        self.inter_token_s = metrics.histogram(names.INTER_TOKEN)
        self.without_token_s = metrics.histogram(names.WITHOUT_TOKEN_SECONDS)
        self.request_s = metrics.histogram(names.REQUEST_SECONDS)
        self.admission_s = metrics.histogram(names.ADMISSION_SECONDS)
        self.queue_s = metrics.histogram(names.QUEUE_SECONDS)
        self.prefill_s = metrics.histogram(names.PREFILL_SECONDS)
        self.transfer_s = metrics.histogram(names.REQUEST_TRANSFER_SECONDS)
        self.decode_s = metrics.histogram(names.DECODE_SECONDS)
        self.prompt_sizes = metrics.histogram(names.REQUEST_PROMPT_TOKENS)
        self.completion_sizes = metrics.histogram(names.REQUEST_COMPLETION_TOKENS)

    def request(self, start: RequestStart) -> RequestObserver:
        """A request begins."""
        return _Request(self, start)

    def refused(self, error: TandemError) -> None:
        """A request was turned away."""
        self.refusals.add(1, error.reason)


class _Request(RequestObserver):
    """One request's times."""

    __slots__ = (
        *("_admitted", "_arrived_s", "_first_s", "_last_s", "_num_prompt_tokens", "_of", "_prompt_computed"),
        "_trace_id",
    )

    def __init__(self, of: RouterMetrics, start: RequestStart) -> None:
        super().__init__(start.traceparent)
        self._of = of
        self._trace_id = sampled_trace_id_of(start.traceparent)
        """For exemplars, of what is told once a request."""
        self._num_prompt_tokens = start.num_prompt_tokens
        self._arrived_s = of.clock.now_s() - start.age_s
        self._admitted = False
        self._prompt_computed = False
        self._first_s: float | None = None
        """When the first token came."""
        self._last_s: dict[int, float] = {}
        """When the latest one of each choice came, by index."""

    def admitted(self) -> None:
        self._admitted = True
        self._of.admission_s.observe(self._of.clock.now_s() - self._arrived_s, trace_id=self._trace_id)

    def placed(
        self, prefill: WorkerInfo | None, decode: WorkerInfo, reason: PlacementReason, prefix_at: PrefixAt
    ) -> None:
        is_taken_over = reason is PlacementReason.HANDED_OVER
        self._of.placements.add(1, "local" if prefill is None else "handed_over" if is_taken_over else "disaggregated")
        self._of.placement_reasons.add(1, reason)
        self._of.recent.placed(reason)
        self._of.prefix_placements.add(1, prefix_at)

    def prompt_computed(self, queue_s: float, prefill_s: float, cached_tokens: int) -> None:
        if self._prompt_computed:
            return  # a replay
        self._prompt_computed = True
        of = self._of
        of.queue_s.observe(queue_s, trace_id=self._trace_id)
        of.prefill_s.observe(prefill_s, trace_id=self._trace_id)
        of.prompt_tokens.add(self._num_prompt_tokens)
        of.cached_tokens.add(cached_tokens)
        of.prompt_sizes.observe(self._num_prompt_tokens)

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        self._of.transfer_s.observe(seconds, trace_id=self._trace_id)

    def tokens(self, num_tokens: int, index: int = 0) -> None:
        of, now_s = self._of, self._of.clock.now_s()
        of.completion_tokens.add(num_tokens)
        if self._first_s is None:
            self._first_s = now_s
            of.first_token_s.observe(now_s - self._arrived_s, trace_id=self._trace_id)
            of.recent.first_token(now_s - self._arrived_s)
            num_tokens -= 1
        if num_tokens:
            # Tokens that come together share the time since the one before them.
            gap_s = (now_s - self._last_s.get(index, self._first_s)) / num_tokens
            of.inter_token_s.observe(gap_s, num_tokens)
            of.recent.inter_token(gap_s, num_tokens)
        self._last_s[index] = now_s

    def moved(self, culprit: WorkerInfo, error: TandemError) -> None:
        self._of.moves.add(1, culprit.role, error.reason)

    def ended(self, end: RequestEnd) -> None:
        if end.finish_reasons:
            cut_off = FinishReason.LENGTH in end.finish_reasons
            self._finished(end, outcome=FinishReason.LENGTH if cut_off else end.finish_reasons[0])
            return
        of = self._of
        of.recent.broken_off()
        if self._first_s is None:
            of.without_token_s.observe(end.total_s, trace_id=self._trace_id)
        if end.error is None:
            of.requests.add(1, "cancelled")
        elif not self._admitted:
            of.refusals.add(1, end.error.reason)
        else:
            of.requests.add(1, "failed")
            of.failures.add(1, end.error.reason)

    def _finished(self, end: RequestEnd, outcome: str) -> None:
        of = self._of
        of.requests.add(1, outcome)
        of.request_s.observe(end.total_s, trace_id=self._trace_id)
        of.recent.finished(end.total_s)
        of.completion_sizes.observe(end.num_completion_tokens)
        if self._first_s is not None:
            of.decode_s.observe(max(self._last_s.values()) - self._first_s, trace_id=self._trace_id)


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
    cached_tokens: int
    """Of the prompt, whose KV nobody computed; where there were replays, of the first try."""


class Timeline(RequestObserver):
    """One request's times, on the clock given. Begins when it is made.

    Only the first prompt computation counts as queue and prefill; hand-offs of replays add up.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.arrived_s = clock.now_s()
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._queue_s: float | None = None
        self._prefill_s = 0.0
        self._transfer_s = 0.0
        self._transfer_bytes = 0
        self.cached_tokens = 0
        """See `Summary`; 0 until the prompt is computed."""

    @property
    def total_s(self) -> float:
        """Arrival to the last token; to now, as long as none came."""
        return self._since_arrival_s() if self._first_token_s is None else self._last_token_s

    def tokens(self, num_tokens: int, index: int = 0) -> None:
        """New tokens are here."""
        self._last_token_s = self._since_arrival_s()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s

    def prompt_computed(self, queue_s: float, prefill_s: float, cached_tokens: int) -> None:
        """A worker computed the prompt, begun `queue_s` after arrival."""
        if self._queue_s is None:
            self._queue_s = queue_s
            self._prefill_s = prefill_s
            self.cached_tokens = cached_tokens

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
            cached_tokens=self.cached_tokens,
        )

    def _since_arrival_s(self) -> float:
        return self._clock.now_s() - self.arrived_s
