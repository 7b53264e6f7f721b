"""How fast the machine is at the moment, against its median in the same run: neighbours slow a shared one down."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

LEAST = 0.7
"""A machine that is slower is not the one that the other figures of the run are from."""
_READ_BYTES = 256 << 20
_SIZE = 2048
_REPEATS = 5


class Pace:
    """Of the cores that torch computes on."""

    def __init__(self, probe_s: Callable[[], float] | None = None) -> None:
        """`probe_s` does some fixed work and returns what it took."""
        self._probe_s = _torch_probe() if probe_s is None else probe_s
        self._taken_s: list[float] = []

    def look(self) -> float:
        """1 = as fast as in the median of all looks so far; takes about 0.1 s."""
        taken_s = self._probe_s()
        self._taken_s.append(taken_s)
        return statistics.median(self._taken_s) / taken_s


def _torch_probe() -> Callable[[], float]:
    """Memory that is read and a product: about as long each."""
    memory = torch.ones(_READ_BYTES // 4)
    left, right = (torch.randn(_SIZE, _SIZE).bfloat16() for _ in range(2))
    work: tuple[Callable[[], object], ...] = (memory.sum, lambda: torch.mm(left, right))
    for each in work:
        each()

    def probe_s() -> float:
        return sum(statistics.median(_time_s(each) for _ in range(_REPEATS)) for each in work)

    return probe_s


def _time_s(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
