"""Ends a worker that has lost a rank of its model, also while no step notices the loss."""

from __future__ import annotations

import asyncio

from engine.rank_link import LEAST_TIMEOUT_S
from engine.ranks import Ranks
from shell.rpc.process import StopSignal
from shell.telemetry.logging import get_logger
from tandem.errors import InternalError

_log = get_logger(__name__)


class RankWatch:
    """Watches inside its `with`, by readers and a timer: no task. Enter it in the event loop.

    A rank that ended is lost at once. A rank that a signal has stopped is lost when two looks in a row find it so: both
    sides of a terminal's ctrl-Z go on together, but not at the same instant.
    """

    def __init__(self, ranks: Ranks, stop: StopSignal) -> None:
        """`stop` is requested once a rank is lost."""
        self._ranks = ranks
        self._stop = stop
        self._period_s = LEAST_TIMEOUT_S / 2
        self._timer: asyncio.TimerHandle | None = None
        self._stopped: int | None = None
        self._lost: str | None = None

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        for rank, end in enumerate(self._ranks.ends, 1):
            loop.add_reader(end, self._lose, f"rank {rank} of the model has ended")
        self._wait(loop)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Raises InternalError if a rank was lost and nothing else says so: the process must not end as if asked to."""
        self._unwatch(asyncio.get_running_loop())
        if self._lost is not None and kind is None:
            raise InternalError(self._lost)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._period_s, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        before, self._stopped = self._stopped, self._ranks.find_stopped()
        if self._stopped is not None and self._stopped == before:
            self._lose(f"rank {self._stopped} of the model stands still")
        else:
            self._wait(loop)

    def _lose(self, why: str) -> None:
        self._unwatch(asyncio.get_running_loop())
        self._lost = why
        _log.error(why)
        self._stop.requested.set()

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        for end in self._ranks.ends:
            loop.remove_reader(end)
        if self._timer is not None:
            self._timer.cancel()
