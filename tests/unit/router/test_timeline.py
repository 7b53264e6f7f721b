from __future__ import annotations

from router.metrics import Summary, Timeline
from tests.manual_clock import ManualClock


def test_times_are_counted_from_arrival_and_replays_add_only_their_hand_offs(clock: ManualClock) -> None:
    timeline = Timeline(clock)
    clock.advance_s(4)
    timeline.prompt_computed(queue_s=1.5, prefill_s=2.0, cached_tokens=3)
    timeline.tokens(1)
    timeline.handed_over(100, 0.25)
    clock.advance_s(2)
    timeline.prompt_computed(queue_s=14.0, prefill_s=9.0, cached_tokens=6)
    timeline.handed_over(50, 0.5)
    timeline.tokens(1)
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
    timeline = Timeline(clock)
    clock.advance_s(2)
    assert timeline.total_s == 2.0
    timeline.tokens(1)
    clock.advance_s(5)
    assert timeline.total_s == 2.0
