"""Cores are kept busy while a block runs, and only then."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.cluster import eventually
from bench.peers import busy
from bench.peers.busy import BusyResults, measure_busy, spinning
from bench.peers.engines import Workload
from bench.peers.job import Job, JobTimes
from bench.peers.process import PeerProcess


def ticks(pid: int) -> int:
    """Processor time of a process so far."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def test_each_core_has_a_process_of_its_own_that_spins_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[PeerProcess] = []

    def start(*arguments: object) -> PeerProcess:
        started.append(PeerProcess(*arguments))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(busy, "PeerProcess", start)
    cores = sorted(os.sched_getaffinity(0))[:2]
    with spinning(cores):
        assert [os.sched_getaffinity(each.pid) for each in started] == [{core} for core in cores]
        before = [ticks(each.pid) for each in started]
        assert eventually(lambda: all(ticks(each.pid) > was for each, was in zip(started, before, strict=True)))
    assert not any(each.is_running for each in started)


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
