from __future__ import annotations

import pytest

from shell.clock import ended_by_deadline


@pytest.mark.parametrize(
    ("passed_s", "left_s", "by_deadline"),
    [
        (5.0, None, False),
        (1.0, 0.0, True),
        (1.0, -0.5, True),
        (0.2, 0.002, True),
        (0.2, 0.04, True),  # a busy process
        (0.1, 0.1, False),
        (100.0, 1.0, True),  # as much as a timeout of 100 s is rounded up on the wire
        (100.0, 3.0, False),
        (0.0, 60.0, False),
    ],
)
def test_a_cancel_at_the_deadline_is_the_deadline(passed_s: float, left_s: float | None, by_deadline: bool) -> None:
    assert ended_by_deadline(passed_s, left_s) is by_deadline
