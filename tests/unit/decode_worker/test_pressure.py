"""When a pool counts as too small for what runs in it."""

import pytest

from decode_worker.pressure import FULL_SHARE, MANY, ROOMY_SHARE, WINDOW_S, Pressure

FULL, BETWEEN, ROOMY = FULL_SHARE / 2, (FULL_SHARE + ROOMY_SHARE) / 2, ROOMY_SHARE


def high() -> Pressure:
    """At 0 s."""
    pressure = Pressure()
    assert pressure.look(0.0, MANY, FULL)
    return pressure


def test_preemptions_in_a_short_time_and_a_full_pool_make_it_high() -> None:
    pressure = Pressure()
    seen = [pressure.look(at * WINDOW_S / MANY, at, FULL) for at in range(MANY + 1)]
    assert seen == [False] * MANY + [True]


@pytest.mark.parametrize("share", [FULL_SHARE, BETWEEN, 1.0])
def test_with_blocks_available_it_is_not(share: float) -> None:
    assert not Pressure().look(0.0, 5 * MANY, share)


def test_the_same_over_a_long_time_is_how_a_pool_is_kept_full() -> None:
    pressure = Pressure()
    assert not any(pressure.look(at * WINDOW_S, at, FULL) for at in range(20))


def test_a_count_that_stands_still_is_no_preemption() -> None:
    pressure = Pressure()
    assert not any(pressure.look(0.1 * at, MANY - 1, FULL) for at in range(50))


def test_it_stays_high_while_preemptions_go_on_and_there_is_little_room() -> None:
    pressure = high()
    assert all(pressure.look(at * WINDOW_S, MANY + at, BETWEEN) for at in range(1, 5))


def test_it_ends_when_there_is_room() -> None:
    pressure = high()
    assert not pressure.look(0.1, MANY, ROOMY)
    assert not pressure.look(0.2, MANY, BETWEEN)


def test_it_ends_when_nothing_was_preempted_for_a_while() -> None:
    pressure = high()
    assert pressure.look(WINDOW_S, MANY, FULL)
    assert not pressure.look(WINDOW_S + 0.1, MANY, FULL)


def test_it_begins_anew_when_a_stream_has_moved() -> None:
    pressure = high()
    pressure.relieved()
    assert not pressure.look(0.1, 2 * MANY - 1, FULL)
    assert pressure.look(0.2, 2 * MANY, FULL)
