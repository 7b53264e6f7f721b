import signal

import pytest

from cli.supervisor import RestartPolicy
from tests.manual_clock import ManualClock

KILLED = -signal.SIGKILL


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def policy(clock: ManualClock) -> RestartPolicy:
    return RestartPolicy(clock, first_delay_s=1, max_delay_s=5, healthy_after_s=30, max_failed_starts=3)


def test_a_healthy_life_starts_the_delays_over(policy: RestartPolicy, clock: ManualClock) -> None:
    policy.became_ready()
    policy.restart_delay_s(KILLED)
    policy.restart_delay_s(KILLED)
    policy.became_ready()
    clock.advance_s(30)
    assert policy.restart_delay_s(KILLED) == 0


def test_a_short_life_does_not(policy: RestartPolicy, clock: ManualClock) -> None:
    policy.became_ready()
    policy.restart_delay_s(KILLED)
    policy.became_ready()
    clock.advance_s(29)
    assert policy.restart_delay_s(KILLED) == 1


def test_a_bad_config_gives_up_at_once(policy: RestartPolicy) -> None:
    assert policy.restart_delay_s(2) is None


@pytest.mark.parametrize("code", [0, 1, 2, KILLED])
def test_what_was_ready_once_is_started_again_whatever_its_code(policy: RestartPolicy, code: int) -> None:
    policy.became_ready()
    assert [policy.restart_delay_s(code) for _ in range(10)] == [0, 1, 2, 4] + [5] * 6


def test_a_child_that_never_gets_ready_is_given_up(policy: RestartPolicy) -> None:
    assert [policy.restart_delay_s(1) for _ in range(3)] == [1, 2, None]
