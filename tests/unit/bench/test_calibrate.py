"""What two served workers cost each other, from what their clients saw."""

from __future__ import annotations

import pytest

from bench.calibrate import sharing_of
from bench.support.streams import Stream


def _stream(sent_s: float, first_s: float, gap_s: float = 0.0, count: int = 1) -> Stream:
    return Stream(sent_s, tuple((sent_s + first_s + gap_s * number, 1) for number in range(count)))


def test_medians_beside_the_other_kind_over_those_alone() -> None:
    alone = [_stream(0.0, 0.5), _stream(1.0, 0.5)]
    beside = [_stream(11.0, 0.75), _stream(12.0, 0.75), _stream(30.0, 0.5)]
    sharing = sharing_of(alone, beside, [_stream(5.0, 0.1, 0.02, 100)], [_stream(10.0, 0.1, 0.025, 200)])
    assert sharing.prompt == pytest.approx(1.5), "the last prompt came when the streams had ended"
    assert sharing.decode == pytest.approx(1.25)


def test_nothing_is_faster_for_having_a_neighbour() -> None:
    sharing = sharing_of(
        [_stream(0.0, 0.5)], [_stream(11.0, 0.4)], [_stream(5.0, 0.1, 0.03, 9)], [_stream(10.0, 0.1, 0.02, 200)]
    )
    assert (sharing.decode, sharing.prompt) == (1.0, 1.0)


def test_streams_that_end_too_early_tell_nothing() -> None:
    with pytest.raises(RuntimeError):
        sharing_of([_stream(0.0, 0.5)], [_stream(20.0, 0.5)], [_stream(5.0, 0.1, 0.02, 9)], [_stream(9, 0.1, 0.02, 9)])
