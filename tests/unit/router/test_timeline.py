from __future__ import annotations

from router.metrics import RouterMetrics, Summary, Timeline
from shell.telemetry.events import KvArrived, PromptComputed, TokensArrived
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from shell.telemetry.recent_latencies import RecentLatencies
from tests.manual_clock import ManualClock


def timeline_of(clock: ManualClock) -> Timeline:
    return Timeline(RouterMetrics(Metrics(Process.ROUTER, "demo"), RecentLatencies(clock), clock))


def test_times_are_counted_from_arrival_and_replays_add_only_their_transfers(clock: ManualClock) -> None:
    timeline = timeline_of(clock)
    clock.advance_s(4)
    timeline.hear(PromptComputed(queue_s=1.5, prefill_s=2.0, cached_tokens=3))
    timeline.hear(TokensArrived(1))
    timeline.hear(KvArrived(100, 0.25))
    clock.advance_s(2)
    timeline.hear(PromptComputed(queue_s=14.0, prefill_s=9.0, cached_tokens=6))
    timeline.hear(KvArrived(50, 0.5))
    timeline.hear(TokensArrived(1))
    clock.advance_s(1)
    assert timeline.summary(7, 2) == Summary(
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


def test_the_total_runs_until_the_last_token_and_without_one_until_now(clock: ManualClock) -> None:
    timeline = timeline_of(clock)
    clock.advance_s(2)
    assert timeline.total_s == 2.0
    timeline.hear(TokensArrived(1))
    clock.advance_s(5)
    assert timeline.total_s == 2.0
