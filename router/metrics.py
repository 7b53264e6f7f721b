"""What happens to requests on the router, counted for metrics, and timed for the request's own last message.

Latencies count from arrival. A replayed request is one request: only the first computation of
its prompt counts, and the gap in which it was replayed is an inter-token gap like any other. Inter-token gaps
are those within a choice; the first one of a choice counts from the request's first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from router.recent_requests import RecentRequests
from shell.clock import Clock
from shell.telemetry import events, gen_ai_names
from shell.telemetry import metric_names as names
from shell.telemetry.metrics import Metrics
from shell.telemetry.recent_latencies import RecentLatencies
from shell.telemetry.trace_context import CANCELLED, sampled_trace_id_of, trace_id_of
from tandem.cluster_status import SlowRequest
from tandem.types import FinishReason, PlacementReason


class RouterMetrics:
    """The router's counters and histograms. `hear` counts refusals; a `Timeline` counts what happens to its request."""

    def __init__(self, metrics: Metrics, recent: RecentLatencies, clock: Clock) -> None:
        self.clock = clock
        self.recent = recent
        self.last = RecentRequests(clock)
        self.requests = metrics.counter(names.REQUESTS)
        self.failures = metrics.counter(names.REQUEST_FAILURES)
        self.refusals = metrics.counter(names.REQUESTS_REFUSED)
        self.placements = metrics.counter(names.PLACEMENTS)
        self.placement_reasons = metrics.counter(names.PLACEMENT_REASONS)
        self.prefix_placements = metrics.counter(names.PREFIX_PLACEMENTS)
        self.failed_tries = metrics.counter(names.FAILED_TRIES)
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
        self.token_s = metrics.histogram(names.REQUEST_TOKEN_SECONDS)
        self.gen_ai_first_token_s, self.gen_ai_token_s = (
            {each: metrics.histogram(metric, each) for each in gen_ai_names.OPERATIONS}
            for metric in (gen_ai_names.TIME_TO_FIRST_TOKEN, gen_ai_names.TIME_PER_OUTPUT_TOKEN)
        )
        self.gen_ai_duration_s = partial(metrics.histogram, gen_ai_names.REQUEST_DURATION)
        for each in gen_ai_names.OPERATIONS:
            self.gen_ai_duration_s(each, "")
        self.prompt_sizes = metrics.histogram(names.REQUEST_PROMPT_TOKENS)
        self.completion_sizes = metrics.histogram(names.REQUEST_COMPLETION_TOKENS)

    def hear(self, event: events.RouterEvent) -> None:
        """A listener of the process."""
        if isinstance(event, events.RequestRefused):
            self.refusals.add(1, event.error.reason)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a request; seconds as in inference.proto's Timings."""

    prompt_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    first_token_s: float
    total_s: float
    transfer_bytes: int
    cached_tokens: int
    """Tokens of the prompt whose KV nobody computed; where there were replays, of the first try."""


class Timeline:
    """One request's times, from its arrival on, which is when a timeline is made; `hear` counts them in the metrics.

    Only the first prompt computation counts as queue and prefill; transfers of replays add up.
    """

    __slots__ = (
        *("_admitted", "_computed_at", "_first_s", "_last_of", "_last_s", "_num_prompt_tokens", "_of", "_operation"),
        *("_placed", "_prefill_s", "_queue_s", "_request_id", "_trace_id", "_traceparent", "_transfer_bytes"),
        *("_transfer_s", "arrived_s", "cached_tokens"),
    )

    def __init__(self, of: RouterMetrics) -> None:
        self._of = of
        self.arrived_s = of.clock.now_s()
        self._trace_id = ""
        """For exemplars, of what is counted once a request; empty unless the trace is recorded."""
        self._request_id = self._traceparent = ""
        self._placed: events.Placed | None = None
        """Where the request is, or was last."""
        self._computed_at: events.Placed | None = None
        """The same, without moves."""
        self._num_prompt_tokens = 0
        self._operation = gen_ai_names.TEXT_COMPLETION
        self._admitted = False
        self._queue_s: float | None = None
        """None until the prompt is computed."""
        self._prefill_s = 0.0
        self._transfer_s = 0.0
        self._transfer_bytes = 0
        self._first_s: float | None = None
        """When the first token came."""
        self._last_s = 0.0
        """When the latest token came."""
        self._last_of: dict[int, float] = {}
        """When the latest token of each choice came, by index."""
        self.cached_tokens = 0
        """See `Summary`; 0 until the prompt is computed."""

    @property
    def total_s(self) -> float:
        """Arrival to the last token; to now, as long as none came."""
        return (self._of.clock.now_s() if self._first_s is None else self._last_s) - self.arrived_s

    def begin(self, event: events.RequestBegan) -> None:
        """The request was read."""
        self._trace_id = sampled_trace_id_of(event.traceparent)
        self._request_id, self._traceparent = event.request_id, event.traceparent
        self._num_prompt_tokens = event.num_prompt_tokens
        self._operation = gen_ai_names.CHAT if event.is_chat else gen_ai_names.TEXT_COMPLETION

    def hear(self, event: events.RequestEvent) -> None:
        """A listener of the request. Tokens come most often."""
        if not isinstance(event, events.TokensArrived):
            self._hear_stage(event)
            return
        of, num_tokens, index = self._of, event.num_tokens, event.index
        now_s = of.clock.now_s()
        of.completion_tokens.add(num_tokens)
        if self._first_s is None:
            self._first_s = now_s
            of.first_token_s.observe(now_s - self.arrived_s, trace_id=self._trace_id)
            of.gen_ai_first_token_s[self._operation].observe(now_s - self.arrived_s)
            of.recent.first_token(now_s - self.arrived_s)
            num_tokens -= 1
        if num_tokens:
            # Tokens that come together share the time since the one before them.
            gap_s = (now_s - self._last_of.get(index, self._first_s)) / num_tokens
            of.inter_token_s.observe(gap_s, num_tokens)
            of.recent.inter_token(gap_s, num_tokens)
        self._last_of[index] = self._last_s = now_s

    def _hear_stage(self, event: events.RequestEvent) -> None:
        of = self._of
        match event:
            case events.Admitted():
                self._admitted = True
                of.admission_s.observe(of.clock.now_s() - self.arrived_s, trace_id=self._trace_id)
            case events.Placed():
                is_move = event.reason is PlacementReason.MOVED
                path = "local" if event.prefill is None else "handed_over" if is_move else "disaggregated"
                of.placements.add(1, path)
                of.placement_reasons.add(1, event.reason)
                of.recent.placed(event.reason)
                of.prefix_placements.add(1, event.prefix_at)
                self._placed, self._computed_at = event, self._computed_at if is_move else event
            case events.PromptComputed() if self._queue_s is None:  # else a replay
                self._prompt_computed(event)
            case events.KvArrived(num_bytes, seconds, route):
                if self._placed is not None and (source := self._placed.prefill) is not None:
                    target = self._placed.decode.worker_id
                    of.last.handed_over(source.worker_id, target, num_bytes, seconds, route)
                self._transfer_bytes += num_bytes
                self._transfer_s += seconds
                of.transfer_s.observe(seconds, trace_id=self._trace_id)
            case events.TryFailed(culprit, error):
                of.failed_tries.add(1, culprit.role, error.reason)
            case events.RequestEnded():
                self._ended(event)

    def summary(self, prompt_tokens: int, completion_tokens: int) -> Summary:
        """The figures so far."""
        return Summary(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            queue_s=self._queue_s or 0.0,
            prefill_s=self._prefill_s,
            transfer_s=self._transfer_s,
            first_token_s=0.0 if self._first_s is None else self._first_s - self.arrived_s,
            total_s=0.0 if self._first_s is None else self._last_s - self.arrived_s,
            transfer_bytes=self._transfer_bytes,
            cached_tokens=self.cached_tokens,
        )

    def _prompt_computed(self, event: events.PromptComputed) -> None:
        of = self._of
        self._queue_s, self._prefill_s, self.cached_tokens = event.queue_s, event.prefill_s, event.cached_tokens
        of.queue_s.observe(event.queue_s, trace_id=self._trace_id)
        of.prefill_s.observe(event.prefill_s, trace_id=self._trace_id)
        of.prompt_tokens.add(self._num_prompt_tokens)
        of.cached_tokens.add(event.cached_tokens)
        of.recent.prompt_computed(self._num_prompt_tokens, event.cached_tokens)
        of.prompt_sizes.observe(self._num_prompt_tokens)

    def _ended(self, event: events.RequestEnded) -> None:
        of, total_s, reasons = self._of, self.total_s, event.finish_reasons
        error_type = CANCELLED if event.error is None else event.error.reason.value
        of.gen_ai_duration_s(self._operation, "" if reasons else error_type).observe(total_s)
        outcome = "cancelled" if event.error is None else "failed"
        if reasons:
            outcome = FinishReason.LENGTH if FinishReason.LENGTH in reasons else reasons[0]
        of.last.ended(*self._ended_request(event, outcome))
        if reasons:
            of.requests.add(1, outcome)
            of.request_s.observe(total_s, trace_id=self._trace_id)
            of.recent.finished(total_s)
            of.completion_sizes.observe(event.num_completion_tokens)
            if self._first_s is not None:
                of.decode_s.observe(self._last_s - self._first_s, trace_id=self._trace_id)
                self._mean_gap(event.num_completion_tokens - 1, self._first_s)
            return
        of.recent.broken_off()
        if self._first_s is None:
            of.without_token_s.observe(total_s, trace_id=self._trace_id)
        if event.error is not None and not self._admitted:
            of.refusals.add(1, event.error.reason)
            return
        of.requests.add(1, outcome)
        if event.error is not None:
            of.failures.add(1, event.error.reason)

    def _ended_request(self, event: events.RequestEnded, outcome: str) -> tuple[SlowRequest, PlacementReason | None]:
        at = self._computed_at
        request = SlowRequest(
            request_id=self._request_id,
            trace_id=trace_id_of(self._traceparent),
            outcome=outcome,
            age_s=0.0,
            total_s=self.total_s,
            first_token_s=0.0 if self._first_s is None else self._first_s - self.arrived_s,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=event.num_completion_tokens,
            prefill="" if at is None else (at.prefill or at.decode).worker_id,
            decode="" if self._placed is None else self._placed.decode.worker_id,
        )
        return request, None if at is None else at.reason

    def _mean_gap(self, num_gaps: int, first_s: float) -> None:
        """Counts the mean of the gaps within choices, each of which begins with the request's first token."""
        if num_gaps > 0:
            mean_s = sum(last_s - first_s for last_s in self._last_of.values()) / num_gaps
            self._of.token_s.observe(mean_s, trace_id=self._trace_id)
            self._of.gen_ai_token_s[self._operation].observe(mean_s)
