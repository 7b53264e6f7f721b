"""Which of several sets of equal workers serves, on a clock that the tests turn."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from router.serving_set import TAKE_OVER_S, ServingSet, SetId

A, B, C = (SetId(name, "layout") for name in "abc")
SETTLED_S = 2 * TAKE_OVER_S


def serving(first: SetId = A, pinned: str = "") -> ServingSet:
    """A choice that was made long ago."""
    chosen = ServingSet(pinned)
    chosen.choose({first: 8}, 0.0)
    chosen.choose({first: 8}, SETTLED_S)
    return chosen


def test_the_first_set_that_is_ready_serves_at_once() -> None:
    chosen = ServingSet()
    assert not chosen.choose({A: 0, B: 0}, 0.0)
    assert chosen.current is None
    assert chosen.choose({A: 0, B: 1}, 1.0)
    assert chosen.current == B


def test_a_larger_set_takes_over_once_it_has_led_for_the_time() -> None:
    chosen = serving()
    assert not chosen.choose({A: 8, B: 9}, SETTLED_S)
    assert not chosen.choose({A: 8, B: 9}, SETTLED_S + TAKE_OVER_S - 0.01)
    assert chosen.choose({A: 8, B: 9}, SETTLED_S + TAKE_OVER_S)
    assert chosen.current == B


def test_a_lead_that_was_lost_in_between_starts_anew() -> None:
    chosen = serving()
    chosen.choose({A: 8, B: 9}, SETTLED_S)
    chosen.choose({A: 9, B: 8}, SETTLED_S + 3)
    assert not chosen.choose({A: 8, B: 9}, SETTLED_S + 4)
    assert not chosen.choose({A: 8, B: 9}, SETTLED_S + 4 + TAKE_OVER_S - 0.01)
    assert chosen.choose({A: 8, B: 9}, SETTLED_S + 4 + TAKE_OVER_S)


def test_a_set_that_is_away_for_a_moment_keeps_serving() -> None:
    chosen = serving()
    assert not chosen.choose({B: 1}, SETTLED_S)
    assert not chosen.choose({A: 8, B: 1}, SETTLED_S + 2)
    assert chosen.current == A


def test_a_set_that_is_gone_is_replaced_as_soon_as_another_is_ready() -> None:
    chosen = serving()
    assert not chosen.choose({}, SETTLED_S)
    assert not chosen.choose({B: 0}, SETTLED_S + TAKE_OVER_S)
    assert chosen.choose({B: 1}, SETTLED_S + TAKE_OVER_S + 1)


def test_of_several_that_are_ahead_only_one_that_was_for_the_time_takes_over() -> None:
    chosen = serving()
    chosen.choose({A: 1, B: 2}, SETTLED_S)
    assert not chosen.choose({A: 1, B: 2, C: 9}, SETTLED_S + TAKE_OVER_S - 1)
    assert chosen.choose({A: 1, B: 2, C: 9}, SETTLED_S + TAKE_OVER_S)
    assert chosen.current == B
    later_s = SETTLED_S + TAKE_OVER_S + 0.25
    assert not chosen.choose({A: 1, B: 2, C: 9}, later_s)
    assert chosen.choose({A: 1, B: 2, C: 9}, later_s + TAKE_OVER_S)
    assert chosen.current == C


def test_nothing_is_set_apart_until_one_serves_or_none_has_for_the_time() -> None:
    chosen = ServingSet()
    chosen.choose({A: 0, B: 0}, 0.0)
    assert chosen.apart == frozenset()
    chosen.choose({A: 0, B: 0}, TAKE_OVER_S)
    assert chosen.apart == {A, B}
    assert chosen.why_apart(A) == "no set of equal workers can serve"
    chosen.choose({A: 0, B: 1}, TAKE_OVER_S + 1)
    assert (chosen.current, chosen.apart) == (B, {A})


def test_of_equal_sets_one_is_preferred_whichever_serves() -> None:
    for first in (A, B):
        chosen = serving(first)
        chosen.choose({A: 8, B: 8}, SETTLED_S)
        chosen.choose({A: 8, B: 8}, SETTLED_S + TAKE_OVER_S)
        assert chosen.current == B


def test_a_router_that_has_just_started_follows_the_leader_at_once() -> None:
    chosen = ServingSet()
    chosen.choose({A: 1}, 0.0)
    assert chosen.choose({A: 1, B: 2}, 0.3)


def test_only_a_set_of_the_pinned_model_serves() -> None:
    chosen = ServingSet(pinned="b")
    assert not chosen.choose({A: 8}, 0.0)
    assert chosen.wanted == SetId("b", "")
    chosen.choose({A: 8, B: 0}, 0.5)
    assert chosen.apart == frozenset()
    assert chosen.choose({A: 8, B: 1}, 1.0)
    assert not chosen.choose({A: 8, B: 0, C: 9}, 60.0)
    assert chosen.current == B
    assert "--model-fingerprint b" in chosen.why_apart(A)


reports = st.lists(st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 3)), min_size=1, max_size=8)


@given(before=reports, other=reports, last=st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 3)))
def test_routers_of_different_pasts_that_hear_the_same_come_to_decide_alike(
    before: list[Mapping[SetId, int]], other: list[Mapping[SetId, int]], last: Mapping[SetId, int]
) -> None:
    if not any(last.values()):
        return
    routers = []
    for past in (before, other):
        chosen = ServingSet()
        for second, seats in enumerate(past):
            chosen.choose(seats, float(second))
        for second in range(20, 20 + 3 * int(TAKE_OVER_S)):
            chosen.choose(last, float(second))
        routers.append(chosen.current)
    assert routers[0] == routers[1]
    assert last[routers[0]] == max(last.values())
