"""How long a call takes on a device: the fastest of many on a CPU, the median with a cold cache on a GPU.

A CPU that others share is only ever slowed down, so its fastest run is nearest to the truth. A GPU's
clock changes under load, so there the median counts. Calls take turns: memory that the last call
left in the cache is not what the next one reads, if the caller gives calls on different memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch

Call = Callable[[], object]

_FLUSH_BYTES = 256 << 20
"""More than any L2."""
_HEAD_START_CYCLES = 1_000_000
"""Half a millisecond: longer than any call takes to queue."""
_MIN_RUNS = 3


def time_s(calls: Sequence[Call], device: torch.device, budget_s: float = 0.3) -> float:
    """Seconds of one call; `calls` do the same work on different memory and take turns for `budget_s`."""
    for call in calls:  # compiles, packs, faults pages in
        call()
    return _cuda_s(calls, device, budget_s) if device.type == "cuda" else _cpu_s(calls, budget_s)


def _cpu_s(calls: Sequence[Call], budget_s: float) -> float:
    """The fastest mean of one round over all calls, which a cache that holds some of them cannot flatter."""
    fastest_s, end_s, runs = float("inf"), time.perf_counter() + budget_s, 0
    while runs < _MIN_RUNS or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        for call in calls:
            call()
        fastest_s = min(fastest_s, (time.perf_counter() - began_s) / len(calls))
        runs += 1
    return fastest_s


def _cuda_s(calls: Sequence[Call], device: torch.device, budget_s: float) -> float:
    """Median between events around each call. Before each, a large buffer is read, which evicts the L2 (writing would
    leave lines there that the timed call has to write back), and the device is kept busy while the host queues what
    follows: launches are hidden, host work between them is not timed.
    """
    flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    turns = cycle(calls)
    measured_s: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(measured_s) < _MIN_RUNS or time.perf_counter() < end_s:
        pairs = []
        for _ in range(_MIN_RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            flush.sum()
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            next(turns)()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(device)
        measured_s += [start.elapsed_time(end) / 1e3 for start, end in pairs]
    return statistics.median(measured_s)
