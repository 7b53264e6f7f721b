"""Counts and times of the texts that came through the KServe face, as its ModelStatistics tells them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.faces.kserve.model import VERSION
from router.timeline import Summary
from tandem.clock import Clock
from tandem.foreign import kserve_pb2

_NANOSECONDS = 1e9
_MILLISECONDS = 1e3


class Statistics:
    """Since the router started. Single-threaded."""

    def __init__(self, clock: Clock, wall_clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._num_finished = 0
        self._num_failed = 0
        self._finished_s = 0.0
        self._queued_s = 0.0
        self._failed_s = 0.0
        self._last_finish_s = 0.0

    @contextmanager
    def text(self) -> Iterator[Callable[[Summary], None]]:
        """Counts one text: as finished if the function given was called before the end, else as failed."""
        began_s = self._clock.now_s()
        finished = False

        def finish(summary: Summary) -> None:
            nonlocal finished
            finished = True
            self._num_finished += 1
            self._finished_s += summary.total_s
            self._queued_s += min(summary.queue_s, summary.total_s)
            self._last_finish_s = self._wall_clock()

        try:
            yield finish
        finally:
            if not finished:
                self._num_failed += 1
                self._failed_s += self._clock.now_s() - began_s

    def of(self, model: str) -> kserve_pb2.ModelStatistics:
        """The figures so far."""
        return kserve_pb2.ModelStatistics(
            name=model,
            version=VERSION,
            last_inference=int(self._last_finish_s * _MILLISECONDS),
            inference_count=self._num_finished,
            execution_count=self._num_finished,
            inference_stats=kserve_pb2.InferStatistics(
                success=_duration(self._num_finished, self._finished_s),
                fail=_duration(self._num_failed, self._failed_s),
                queue=_duration(self._num_finished, self._queued_s),
                compute_infer=_duration(self._num_finished, self._finished_s - self._queued_s),
            ),
        )


def _duration(count: int, seconds: float) -> kserve_pb2.StatisticDuration:
    return kserve_pb2.StatisticDuration(count=count, ns=int(max(0.0, seconds) * _NANOSECONDS))
