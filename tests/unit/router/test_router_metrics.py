"""What the router's metrics make of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from router.metrics import RouterMetrics, Summary, Timeline
from shell.telemetry.events import (
    Admitted,
    KvArrived,
    Placed,
    PromptComputed,
    RequestBegan,
    RequestEnded,
    RequestRefused,
    TokensArrived,
    TryFailed,
)
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from shell.telemetry.recent_latencies import RecentLatencies
from tandem.errors import DeadlineExceeded, Overloaded, Reason, Unavailable, rebuild_error
from tandem.types import (
    FinishReason,
    KvRoute,
    PlacementReason,
    PrefixAt,
    RequestId,
    Role,
    SamplingParams,
    WorkerId,
    WorkerInfo,
)
from tests.manual_clock import ManualClock
from tests.registering import INFO
from tests.scraped import counted, total

NOT_OF_SEQUENCES = {Reason.TLS_FAILED, Reason.WORKER_ID_TAKEN, Reason.PREFIX_NOT_HELD, Reason.MODEL_CHANGED}
"""Of which no worker says a word about a sequence, or for which no worker is at fault."""
MOVING = [each for each in Reason if rebuild_error(each, "").retryable and each not in NOT_OF_SEQUENCES]
"""Reasons for which another pair is tried."""


def worker(role: Role) -> WorkerInfo:
    """One that nothing is known of but its role."""
    return replace(INFO, role=role)


class Scene:
    """A router's metrics, and the clock that its requests live by."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.recent = RecentLatencies(self.clock)
        self.metrics = Metrics(Process.ROUTER, "demo")
        self.counts = RouterMetrics(self.metrics, self.recent, self.clock)

    def request(
        self, *, num_prompt_tokens: int = 10, traceparent: str = "00-a-b-01", is_chat: bool = False
    ) -> Timeline:
        timeline = Timeline(self.counts)
        began = RequestBegan(RequestId("r"), num_prompt_tokens, SamplingParams(8), 0, traceparent, is_chat=is_chat)
        timeline.begin(began)
        return timeline

    def traces(self, name: str) -> set[str]:
        """Trace ids that OpenMetrics shows with the buckets of a histogram."""
        body, _ = self.metrics.exposition("application/openmetrics-text")
        families = openmetrics_families(body.decode())  # type: ignore[no-untyped-call]
        samples = [sample for family in families for sample in family.samples if sample.name == f"{name}_bucket"]
        return {sample.exemplar.labels["trace_id"] for sample in samples if sample.exemplar}

    def value(self, name: str, **labels: Any) -> float:
        """The one sample of this name and these labels."""
        return counted(self.metrics.exposition()[0].decode(), name, **labels)

    def total(self, name: str) -> float:
        """The sum of the samples of this name."""
        return total(self.metrics.exposition()[0].decode(), name)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_time_to_first_token_counts_from_arrival(scene: Scene) -> None:
    request = scene.request()
    scene.clock.advance_s(0.75)
    request.hear(TokensArrived(1))
    assert scene.value("tandem_time_to_first_token_seconds_sum") == pytest.approx(0.75)
    assert scene.value("tandem_inter_token_seconds_count") == 0
    assert scene.recent.activity().latencies[0].count == 1


def test_tokens_that_come_together_share_the_gap(scene: Scene) -> None:
    request = scene.request()
    request.hear(TokensArrived(1))
    scene.clock.advance_s(0.04)
    request.hear(TokensArrived(4))
    assert scene.value("tandem_inter_token_seconds_count") == 4
    assert scene.value("tandem_inter_token_seconds_sum") == pytest.approx(0.04)
    assert scene.value("tandem_inter_token_seconds_bucket", le="0.01") == 4
    assert scene.value("vllm:inter_token_latency_seconds_bucket", le="0.01") == 4
    assert scene.value("tandem_completion_tokens_total") == 5


def test_a_first_message_of_several_tokens_has_gaps_of_nothing(scene: Scene) -> None:
    scene.request().hear(TokensArrived(3))
    assert scene.value("tandem_time_to_first_token_seconds_count") == 1
    assert scene.value("tandem_inter_token_seconds_count") == 2
    assert scene.value("tandem_inter_token_seconds_sum") == 0


def test_a_finished_request_tells_its_times_and_sizes(scene: Scene) -> None:
    request = scene.request(num_prompt_tokens=12)
    scene.clock.advance_s(0.1)
    request.hear(Admitted())
    request.hear(Placed(worker(Role.PREFILL), worker(Role.DECODE), PlacementReason.REMOTE_STATIC, PrefixAt.NOWHERE))
    request.hear(PromptComputed(queue_s=0.3, prefill_s=0.2, cached_tokens=8))
    request.hear(KvArrived(1024, 0.05))
    request.hear(TokensArrived(1))
    scene.clock.advance_s(0.7)
    request.hear(TokensArrived(2))
    request.hear(RequestEnded(3, (FinishReason.LENGTH,)))
    assert scene.value("tandem_requests_total", outcome="length") == 1
    assert scene.value("vllm:request_success_total", finished_reason="length") == 1
    sums = {
        "tandem_request_admission_seconds": 0.1,
        "tandem_request_queue_seconds": 0.3,
        "tandem_request_prefill_seconds": 0.2,
        "tandem_request_transfer_seconds": 0.05,
        "tandem_request_decode_seconds": 0.7,
        "tandem_request_time_per_output_token_seconds": 0.35,
        "vllm:request_time_per_output_token_seconds": 0.35,
        "gen_ai_server_request_duration_seconds": 0.8,
        "tandem_request_seconds": 0.8,
        "tandem_request_prompt_tokens": 12,
        "tandem_request_completion_tokens": 3,
    }
    assert {name: scene.total(f"{name}_sum") for name in sums} == pytest.approx(sums)
    assert scene.value("tandem_prompt_tokens_total") == 12
    assert scene.value("tandem_cached_prompt_tokens_total") == 8
    assert scene.recent.activity().latencies[2].count == 1


@pytest.mark.parametrize(
    ("end", "outcome", "reason"),
    [
        (RequestEnded(0), "cancelled", None),
        (RequestEnded(2, error=Unavailable("gone", Reason.WORKER_LOST)), "failed", "WORKER_LOST"),
    ],
)
def test_a_request_that_broke_off_has_an_outcome_but_no_latency(
    scene: Scene, end: RequestEnded, outcome: str, reason: str | None
) -> None:
    request = scene.request()
    request.hear(Admitted())
    request.hear(end)
    assert scene.value("tandem_requests_total", outcome=outcome) == 1
    assert reason is None or scene.value("tandem_request_failures_total", reason=reason) == 1
    assert scene.value("tandem_request_seconds_count") == 0
    assert scene.recent.activity().total_requests == 1


@pytest.mark.parametrize("end", [RequestEnded(0), RequestEnded(0, error=DeadlineExceeded("late"))])
def test_who_ends_without_a_first_token_has_waited_in_vain(scene: Scene, end: RequestEnded) -> None:
    request = scene.request()
    scene.clock.advance_s(2.5)
    request.hear(end)
    assert scene.value("tandem_request_without_token_seconds_sum") == 2.5
    assert scene.value("tandem_request_without_token_seconds_bucket", le="2.0") == 0
    assert scene.value("tandem_time_to_first_token_seconds_count") == 0


def test_who_breaks_off_after_a_token_has_not_waited_in_vain(scene: Scene) -> None:
    request = scene.request()
    request.hear(TokensArrived(1))
    request.hear(RequestEnded(1))
    assert scene.value("tandem_request_without_token_seconds_count") == 0


def test_a_request_of_one_token_has_no_time_per_token(scene: Scene) -> None:
    request = scene.request()
    request.hear(TokensArrived(1))
    request.hear(RequestEnded(1, (FinishReason.LENGTH,)))
    assert scene.value("tandem_request_time_per_output_token_seconds_count") == 0


@pytest.mark.parametrize(
    ("end", "error_type"),
    [
        (RequestEnded(1, (FinishReason.STOP,)), ""),
        (RequestEnded(1), "cancelled"),
        (RequestEnded(1, error=DeadlineExceeded("late")), "DEADLINE_EXCEEDED"),
    ],
)
def test_opentelemetrys_metrics_tell_operation_and_error(scene: Scene, end: RequestEnded, error_type: str) -> None:
    request = scene.request(is_chat=True)
    scene.clock.advance_s(0.5)
    request.hear(TokensArrived(1))
    request.hear(end)
    of_chat = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "tandem",
        "gen_ai_request_model": "demo",
        "gen_ai_response_model": "demo",
    }
    duration, first = "gen_ai_server_request_duration_seconds", "gen_ai_server_time_to_first_token_seconds"
    assert scene.value(f"{duration}_sum", **of_chat, error_type=error_type) == 0.5
    assert scene.value(f"{first}_sum", **of_chat) == 0.5
    assert scene.value(f"{first}_count", gen_ai_operation_name="text_completion") == 0


@pytest.mark.parametrize("reason", MOVING)
def test_every_reason_that_moves_a_request_stands_at_zero_before_it_does(scene: Scene, reason: Reason) -> None:
    assert scene.value("tandem_request_failures_total", reason=reason) == 0
    for role in Role:
        assert scene.value("tandem_request_moves_total", worker_role=role, reason=reason) == 0


def test_turned_away_at_the_door_or_by_admission_is_refused_and_no_outcome(scene: Scene) -> None:
    scene.counts.hear(RequestRefused(Unavailable("draining", Reason.DRAINING)))
    scene.request().hear(RequestEnded(0, error=Overloaded("full")))
    assert scene.value("tandem_requests_refused_total", reason="DRAINING") == 1
    assert scene.value("tandem_requests_refused_total", reason="QUEUE_FULL") == 1
    assert scene.value("tandem_requests_total", outcome="failed") == 0


def test_a_replay_counts_as_a_move_and_its_prompt_only_once(scene: Scene) -> None:
    request = scene.request(num_prompt_tokens=12)
    request.hear(Placed(worker(Role.PREFILL), worker(Role.DECODE), PlacementReason.REMOTE_STATIC, PrefixAt.NOWHERE))
    request.hear(PromptComputed(0.1, 0.1, 0))
    request.hear(TokensArrived(1))
    request.hear(TryFailed(worker(Role.DECODE), Unavailable("lost", Reason.WORKER_LOST)))
    request.hear(Placed(None, worker(Role.DECODE), PlacementReason.LOCAL_SHORT, PrefixAt.NOWHERE))
    request.hear(Placed(worker(Role.ELASTIC), worker(Role.ELASTIC), PlacementReason.MOVED, PrefixAt.NOWHERE))
    request.hear(PromptComputed(2.0, 0.1, 8))
    assert scene.value("tandem_request_moves_total", worker_role="decode", reason="WORKER_LOST") == 1
    assert scene.value("tandem_request_placements_total", path="disaggregated") == 1
    assert scene.value("tandem_request_placements_total", path="local") == 1
    assert scene.value("tandem_request_placements_total", path="handed_over") == 1
    assert scene.value("tandem_placement_total", reason="remote_static") == 1
    assert scene.value("tandem_placement_total", reason="local_short") == 1
    assert scene.value("tandem_prompt_tokens_total") == 12
    assert scene.value("tandem_cached_prompt_tokens_total") == 0
    assert scene.value("tandem_request_queue_seconds_count") == 1


def test_the_last_requests_say_where_they_ran_and_what_was_handed_over(scene: Scene) -> None:
    prefill, decode = replace(worker(Role.PREFILL), worker_id=WorkerId("p")), worker(Role.DECODE)
    request = scene.request(traceparent=f"00-{'a' * 32}-b-01")
    scene.clock.advance_s(2)
    request.hear(Admitted())
    request.hear(Placed(prefill, decode, PlacementReason.REMOTE_STATIC, PrefixAt.NOWHERE))
    request.hear(PromptComputed(0.1, 0.1, 8))
    request.hear(KvArrived(1024, 0.05, KvRoute("shm", "cuda_ipc: no GPU")))
    request.hear(TokensArrived(1))
    request.hear(Placed(decode, prefill, PlacementReason.MOVED, PrefixAt.NOWHERE))
    request.hear(RequestEnded(1, (FinishReason.STOP,)))
    scene.request().hear(RequestEnded(0, error=Overloaded("full")))
    slow, refused = scene.counts.last.slowest()
    assert (slow.trace_id, slow.outcome, slow.total_s, slow.first_token_s) == ("a" * 32, "stop", 2.0, 2.0)
    assert (slow.prefill, slow.decode, refused.outcome, refused.decode) == ("p", "p", "failed", "")
    (pair,) = scene.counts.last.handoffs()
    assert (pair.source, pair.target, pair.num_bytes, pair.transport) == ("p", decode.worker_id, 1024, "shm")
    assert [each.reason for each in scene.counts.last.placements()] == ["remote_static", "not_placed"]
    activity = scene.recent.activity()
    assert (activity.prompt_tokens, activity.cached_tokens) == (10, 8)


def test_gaps_are_those_within_a_choice(scene: Scene) -> None:
    request = scene.request()
    for index in range(2):
        request.hear(TokensArrived(1, index))
    scene.clock.advance_s(0.04)
    for index in range(2):
        request.hear(TokensArrived(1, index))
    request.hear(RequestEnded(4, (FinishReason.STOP, FinishReason.LENGTH)))
    assert scene.value("tandem_time_to_first_token_seconds_count") == 1
    assert scene.value("tandem_inter_token_seconds_count") == 3
    assert scene.value("tandem_inter_token_seconds_sum") == pytest.approx(0.08)
    assert scene.value("tandem_request_time_per_output_token_seconds_sum") == pytest.approx(0.08 / 3)
    assert scene.value("tandem_completion_tokens_total") == 4
    assert scene.value("tandem_requests_total", outcome="length") == 1


@pytest.mark.parametrize(("flags", "shown"), [("01", {"a"}), ("03", {"a"}), ("00", set())])
def test_latencies_of_a_recorded_trace_name_it(scene: Scene, flags: str, shown: set[str]) -> None:
    request = scene.request(traceparent=f"00-a-b-{flags}")
    request.hear(Admitted())
    request.hear(PromptComputed(0.1, 0.2, 0))
    request.hear(TokensArrived(2))
    request.hear(RequestEnded(2, (FinishReason.LENGTH,)))
    stages = (
        "time_to_first_token",
        "request",
        "request_admission",
        "request_queue",
        "request_prefill",
        "request_decode",
    )
    assert [scene.traces(f"tandem_{stage}_seconds") for stage in stages] == [shown] * len(stages)
    assert scene.traces("vllm:e2e_request_latency_seconds") == shown
    assert scene.traces("tandem_inter_token_seconds") == set()


def test_a_summary_counts_from_arrival_and_replays_add_only_their_transfers(scene: Scene) -> None:
    request = scene.request()
    scene.clock.advance_s(4)
    request.hear(PromptComputed(queue_s=1.5, prefill_s=2.0, cached_tokens=3))
    request.hear(TokensArrived(1))
    request.hear(KvArrived(100, 0.25))
    scene.clock.advance_s(2)
    request.hear(PromptComputed(queue_s=14.0, prefill_s=9.0, cached_tokens=6))
    request.hear(KvArrived(50, 0.5))
    request.hear(TokensArrived(1))
    scene.clock.advance_s(1)
    assert request.summary(7, 2) == Summary(
        prompt_tokens=7,
        completion_tokens=2,
        queue_s=1.5,
        prefill_s=2.0,
        transfer_s=0.75,
        first_token_s=4.0,
        total_s=6.0,
        transfer_bytes=150,
        cached_tokens=3,
    )


def test_the_total_runs_until_the_last_token_and_without_one_until_now(scene: Scene) -> None:
    request = scene.request()
    scene.clock.advance_s(2)
    assert request.total_s == 2.0
    request.hear(TokensArrived(1))
    scene.clock.advance_s(5)
    assert request.total_s == 2.0
