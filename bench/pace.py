"""How fast the machine is at the moment, against its median in the same run: neighbours slow a shared one down."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import torch

from bench.peers.job import peer_dtype
from bench.support.timing import time_s

LEAST = 0.7
"""A machine that is slower is not the one that the other figures of the run are from."""
APART_S = 5.0
_MOST_LOOKS = 12
_MOST_REDONE = 2
_READ_BYTES = 256 << 20
_SIZE = 2048
_BUDGET_S = 0.05

_Found = TypeVar("_Found")


class Pace:
    """Of the cores that torch computes on."""

    def __init__(self, probe_s: Callable[[], float] | None = None) -> None:
        """`probe_s` does some fixed work and returns what it took."""
        self._probe_s = _torch_probe() if probe_s is None else probe_s
        self._taken_s: list[float] = []

    def look(self) -> float:
        """1 = as fast as in the median of all looks so far."""
        taken_s = self._probe_s()
        self._taken_s.append(taken_s)
        return statistics.median(self._taken_s) / taken_s

    async def wait(self) -> float:
        """Looks every `APART_S` until the machine is not slow, a minute at most; returns the last look.

        The looks before it are forgotten: many of one slow minute would make it the usual one.
        """
        for _ in range(_MOST_LOOKS - 1):
            if (pace := self.look()) >= LEAST:
                return pace
            self._taken_s.pop()
            await asyncio.sleep(APART_S)
        return self.look()

    async def hold(
        self, turn: Callable[[], AbstractAsyncContextManager[Any]], measure: Callable[[], Awaitable[_Found]]
    ) -> tuple[_Found, float, int]:
        """What `measure` found, the lower of the paces before and after it, and how often it was done again.

        It is done again if the machine was slow, twice at most. Looks after a `turn`, when the server has ended what it
        was asked: then it computes nothing, and one that would wait busily has been stopped.
        """
        redone = 0
        while True:
            async with turn():
                pass
            before = await self.wait()
            found = await measure()
            async with turn():
                pass
            pace = min(before, self.look())
            if pace >= LEAST or redone == _MOST_REDONE:
                return found, pace, redone
            redone += 1


def _torch_probe() -> Callable[[], float]:
    """Memory that is read, and a product in the type that torch multiplies fast here."""
    memory = torch.ones(_READ_BYTES // 4)
    dtype = getattr(torch, peer_dtype(torch.backends.cpu.get_cpu_capability()))
    left, right = (torch.randn(_SIZE, _SIZE).to(dtype) for _ in range(2))
    work = (memory.sum, lambda: torch.mm(left, right))
    return lambda: sum(time_s([each], memory.device, _BUDGET_S) for each in work)
