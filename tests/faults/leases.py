"""Leases of this process's kv connections: long while peers connect, short once a test has stopped one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import pytest

from kvtransfer.timing import Timing

SHORT_S = 2.0


@dataclass(frozen=True)
class Lively(Timing):
    """Heartbeats as a short lease needs them."""

    @property
    def heartbeat_s(self) -> float:
        """A tenth of it."""
        return SHORT_S / 10


class Leases:
    """As long as each connection's timing says until `shorten`, then `SHORT_S` for all that have one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._are_short = False
        self._waits: list[asyncio.Timeout] = []
        self._timeout_at = asyncio.timeout_at
        monkeypatch.setattr(asyncio, "timeout_at", self._begin)  # `Connection` alone calls it

    def shorten(self) -> None:
        """Shortens every lease, those under way too."""
        self._are_short = True
        for wait in self._waits:
            with suppress(RuntimeError):  # it has ended
                wait.reschedule(self._soonest(wait.when()))

    def _begin(self, ends_s: float | None) -> asyncio.Timeout:
        wait = self._timeout_at(self._soonest(ends_s))
        self._waits.append(wait)
        return wait

    def _soonest(self, ends_s: float | None) -> float | None:
        """No silence is a loss where `ends_s` is None."""
        if ends_s is None or not self._are_short:
            return ends_s
        return min(ends_s, asyncio.get_running_loop().time() + SHORT_S)
