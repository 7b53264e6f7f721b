import contextlib
import json
import os
import sys
from collections.abc import Iterator

import pytest

from bench.peers.job import Job
from bench.peers.process import EngineProcess, PeerError, PeerProcess, closing_all
from bench.support.cluster import eventually

ECHO = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)"
DIES = "import sys; print('why it died', file=sys.stderr); sys.exit(3)"
STUBBORN = (
    "import signal, subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    "print(child.pid, flush=True)\n"
    "signal.pause()"
)
ENGINE = """
import sys
sys.argv = ["engine", "model", "2", '{"form": "int8"}']
from bench.peers.job import JobTimes, OpenedEngine, serve_jobs
def run(job):
    print("noise on stdout")
    return JobTimes(0.5, [0.1] * job.decode_steps, job.prompts(10)[0][:1])
serve_jobs(lambda model, threads, form: OpenedEngine(run, {"model": str(model), "threads": str(threads), "form": form}))
"""


@contextlib.contextmanager
def running(code: str) -> Iterator[PeerProcess]:
    process = PeerProcess("fake", (sys.executable, "-c", code))
    with closing_all([process]):
        yield process


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"  # whoever adopts orphans may not have reaped it yet
    return False


def test_a_process_that_ends_is_named_with_its_log() -> None:
    with running(DIES) as process, pytest.raises(PeerError, match=r"(?s)fake ended.*why it died"):
        process.receive(10.0)


def test_silence_has_a_deadline() -> None:
    with running(ECHO) as process, pytest.raises(PeerError, match="said nothing"):
        process.receive(0.01)


def test_closing_ends_children_and_even_a_paused_process() -> None:
    with running(STUBBORN) as process:
        child = int(process.receive(10.0))
        assert exists(child)
        process.pause()
    assert not process.is_running
    assert eventually(lambda: not exists(child))


def test_an_engine_process_answers_jobs_whatever_it_prints() -> None:
    with running(ENGINE) as process:
        engine = EngineProcess(process)
        engine.wait_open()
        job = Job(2, 4, 3, None, 7)
        times = engine.run(job)
        assert engine.resident_bytes > 1_000_000
    assert engine.facts == {"model": "model", "threads": "2", "form": "int8"}
    assert (times.prefill_s, times.step_s, times.first_tokens) == (0.5, [0.1] * 3, job.prompts(10)[0][:1])
    assert json.dumps(times.first_tokens)
