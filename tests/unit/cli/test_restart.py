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


@pytest.mark.parametrize(("life_s", "delay_s"), [(30, 0), (29, 1)])
def test_a_healthy_life_starts_the_delays_over(
    policy: RestartPolicy, clock: ManualClock, life_s: float, delay_s: float
) -> None:
    policy.became_ready()
    policy.restart_delay_s(KILLED)
    policy.became_ready()
    clock.advance_s(life_s)
    assert policy.restart_delay_s(KILLED) == delay_s


@pytest.mark.parametrize("code", [0, 1, 2, KILLED])
def test_what_was_ready_once_is_started_again_whatever_its_code(policy: RestartPolicy, code: int) -> None:
    policy.became_ready()
    assert [policy.restart_delay_s(code) for _ in range(10)] == [0, 1, 2, 4] + [5] * 6


def test_a_child_that_never_gets_ready_is_given_up(policy: RestartPolicy) -> None:
    assert [policy.restart_delay_s(1) for _ in range(3)] == [1, 2, None]
