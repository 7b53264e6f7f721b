"""A decode step beside a busy process on the same cores, against the same step alone.

The busy process and its children spin, one on each core, at the engine's own priority and in one session: so each core
is shared by two, and a step that lost no more than its share would take twice as long. (Where Linux groups processes by
their session, one session for each core would leave the engine a third.) Quiet and busy steps take turns.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from bench.peers.engines import JobEngine, Measured, Workload, run_workload
from bench.peers.process import PeerProcess, closing_all

BUSY_WORKLOADS = (Workload(1, 256, 48), Workload(16, 256, 32))
QUIET, BUSY = "quiet", "busy"
_SPIN = """
import os, sys
core, *others = map(int, sys.argv[1:])
for other in others:
    if os.fork() == 0:
        core = other
        break
os.sched_setaffinity(0, {core})
parent = os.getppid()
print("spinning", flush=True)
while os.getppid() == parent:  # else it was killed
    for _ in range(100_000):
        pass
"""
_START_TIMEOUT_S = 60.0

BusyResults = dict[str, dict[str, Measured]]
"""By workload, then `quiet` or `busy`."""


@contextlib.contextmanager
def spinning(cores: Sequence[int]) -> Iterator[None]:
    """Keeps each of `cores` busy until the block ends. Raises PeerError if that fails."""
    process = PeerProcess("spinner", (sys.executable, "-S", "-c", _SPIN, *map(str, cores)))
    with closing_all([process]):
        for _ in cores:
            process.receive(_START_TIMEOUT_S)
        yield


def measure_busy(
    engine: JobEngine, workloads: Sequence[Workload], cores: Sequence[int], number: int, results: BusyResults
) -> None:
    """Adds round `number`. Raises PeerError."""
    for index, workload in enumerate(workloads):
        states = results.setdefault(workload.name, {QUIET: Measured(), BUSY: Measured()})
        run_workload(engine, workload, (2 * number) * len(workloads) + index, states[QUIET])
        with spinning(cores):
            run_workload(engine, workload, (2 * number + 1) * len(workloads) + index, states[BUSY])
