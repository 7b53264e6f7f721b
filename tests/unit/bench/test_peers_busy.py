"""Cores are kept busy while a block runs, and only then."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.peers import busy
from bench.peers.busy import BusyResults, measure_busy, spinning
from bench.peers.engines import Workload
from bench.peers.job import Job, JobTimes
from bench.peers.process import PeerProcess, closing_all
from bench.support.cluster import eventually


def ticks(pid: int) -> int:
    """Processor time of a process so far."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def of_session(session: int) -> set[int]:
    """Processes that have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.add(int(path.parent.name))
    return found


def test_each_core_has_a_process_that_spins_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[PeerProcess] = []

    def start(*arguments: object) -> PeerProcess:
        started.append(PeerProcess(*arguments))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(busy, "PeerProcess", start)
    cores = sorted(os.sched_getaffinity(0))[:2]
    with spinning(cores):
        (session,) = (each.pid for each in started)  # of all: else the scheduler may give the engine less than half
        spinners = of_session(session)
        assert sorted(sorted(os.sched_getaffinity(each)) for each in spinners) == [[core] for core in cores]
        before = {each: ticks(each) for each in spinners}
        assert eventually(lambda: all(ticks(each) > was for each, was in before.items()))
    assert eventually(lambda: not of_session(session))


def test_none_spins_on_when_the_first_is_killed() -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    process = PeerProcess("spinner", (sys.executable, "-S", "-c", busy._SPIN, *map(str, cores * 2)))
    with closing_all([process]):
        for _ in range(2):
            process.receive(30)
        assert len(of_session(process.pid)) == 2
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: not of_session(process.pid))


@dataclass
class FakeEngine:
    """Takes 1 s a step, 3 s while it is busy around it."""

    state: list[str]
    name: str = "tandem"
    jobs: list[Job] = field(default_factory=list)

    def run(self, job: Job) -> JobTimes:
        self.jobs.append(job)
        return JobTimes(1.0, [3.0 if self.state else 1.0] * job.decode_steps, [0] * job.num_seqs)


def test_quiet_and_busy_steps_take_turns_on_prompts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    state: list[str] = []

    class FakeSpinning:
        def __init__(self, cores: object) -> None: ...

        def __enter__(self) -> None:
            state.append("busy")

        def __exit__(self, *_: object) -> None:
            state.clear()

    monkeypatch.setattr(busy, "spinning", FakeSpinning)
    engine, results = FakeEngine(state), BusyResults()
    for number in range(2):
        measure_busy(engine, [Workload(1, 8, 2), Workload(2, 8, 1)], [0], number, results)
    assert results["1 × 8"]["quiet"].step_s == [1.0] * 4
    assert results["1 × 8"]["busy"].step_s == [3.0] * 4
    assert results["2 × 8"]["busy"].step_s == [3.0] * 2
    assert len({job.seed for job in engine.jobs}) == len(engine.jobs) == 8
