"""Processes of peers as `bench.peers` holds them: started with a log, spoken to with deadlines, ended for certain.

Each leads a process group of its own, so that the children of a peer's server end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from bench.peers.contenders import Contender, Environments
from bench.peers.job import Job, JobTimes
from bench.support.processes import usage

ROOT = Path(__file__).parents[2]
OPEN_TIMEOUT_S = 240.0
JOB_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
_LOG_TAIL = 2000
_CAUSE_LENGTH = 200


def open_log() -> IO[bytes]:
    """A file without a name, gone when it is closed."""
    return tempfile.TemporaryFile()


class PeerError(Exception):
    """A peer did not start, did not answer in time, or died; the message ends with the end of its log."""

    @property
    def cause(self) -> str:
        """What happened and the log's last line, which names the exception if there was one: for tables."""
        first, *log = str(self).strip().split("\n")
        return f"{first} {log[-1].strip()[:_CAUSE_LENGTH]}" if log else first


class PeerProcess:
    """A child with its stdin and stdout as pipes and its log in a file."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path = ROOT
    ) -> None:
        """`environment` is added to this process's; the child begins in `folder`."""
        self.name = name
        self._log = open_log()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=None if environment is None else {**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = threading.Thread(target=self._read, args=(self._stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the child; its process group has the same number."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process.poll() is None

    def send(self, line: str) -> None:
        """Writes one line to it. Raises PeerError if it is gone."""
        try:
            self._stdin.write(line + "\n")
            self._stdin.flush()
        except OSError as error:
            raise self.failure("is gone") from error

    def receive(self, timeout_s: float) -> str:
        """The next line that it writes. Raises PeerError at the deadline, or if it has ended."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise self.failure(f"said nothing for {timeout_s:.0f} s") from None
        if not line:
            raise self.failure("ended")
        return line

    def failure(self, what: str) -> PeerError:
        """The error to raise, with the end of the log."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LOG_TAIL))
        return PeerError(f"{self.name} {what}:\n{self._log.read().decode(errors='replace')}")

    def pause(self) -> None:
        """Stops it and its children, which would otherwise spin on cores that another engine is measured on."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them run on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends it and what it started: end of input, SIGTERM, then SIGKILL to the group."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # children that outlived it
        self._reader.join(STOP_TIMEOUT_S)
        self._stdout.close()
        self._log.close()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put("")


class EngineProcess:
    """An engine in a process of its own; see `bench.peers.job`."""

    def __init__(self, process: PeerProcess) -> None:
        self._process = process
        self.facts: dict[str, str] = {}

    @property
    def name(self) -> str:
        """Of the peer."""
        return self._process.name

    def wait_open(self) -> None:
        """Blocks until it can take jobs. Raises PeerError."""
        self.facts = json.loads(self._process.receive(OPEN_TIMEOUT_S))

    def run(self, job: Job) -> JobTimes:
        """One job. Raises PeerError."""
        self._process.send(json.dumps(asdict(job)))
        answer: dict[str, Any] = json.loads(self._process.receive(JOB_TIMEOUT_S))
        return JobTimes(**answer)

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds now, the program's own and files that it maps included; 0 where nothing tells."""
        found = usage(self._process.pid)
        return 0 if found is None else found.rss_bytes

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


def vllm_environment(vllm_python: Path, cores: Sequence[int]) -> dict[str, str]:
    """What vLLM's own guide for CPUs sets: one OpenMP thread a core, Intel's runtime and tcmalloc where they are."""
    intel = vllm_python.parent.parent / "lib" / "libiomp5.so"
    tcmalloc = next(iter(sorted(Path("/usr/lib").glob("*-linux-gnu/libtcmalloc_minimal.so.*"))), None)
    preloaded = [str(each) for each in (tcmalloc, intel) if each is not None and each.exists()]
    listed = ",".join(map(str, cores))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": listed,
        "VLLM_USE_AOT_COMPILE": "0",  # what it stores it cannot load again on a CPU: every start would compile
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400",  # a step may stand still through the turns of others
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
    }


def engine_in_process_environment(cores: Sequence[int]) -> dict[str, str]:
    """What vLLM sets for its worker process; the driver has none, its engine runs in the driver itself."""
    listed = ",".join(map(str, cores))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(len(cores)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def end_in_order() -> None:
    """Lets SIGTERM and a closed terminal end this process as ctrl-C does, so that its children end too."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, leave)


def engine_process(
    contender: Contender, model: Path, cores: Sequence[int], environments: Environments
) -> EngineProcess:
    """Starts a contender that has an environment on `model`, one thread a core."""
    module = f"{contender.program}_engine"
    arguments = (str(model), str(len(cores)), json.dumps(dict(contender.options)))
    python, environment = _where(contender, cores, environments)
    if python is None:
        return EngineProcess(PeerProcess(contender.name, (sys.executable, "-m", f"bench.peers.{module}", *arguments)))
    command = (str(python), "-P", str(ROOT / "bench" / "peers" / f"{module}.py"), *arguments)
    return EngineProcess(PeerProcess(contender.name, command, environment))


def _where(
    contender: Contender, cores: Sequence[int], environments: Environments
) -> tuple[Path | None, dict[str, str]]:
    """A contender's python, None for this one, and what is set for it."""
    if contender.program == "llama":
        return environments.llama_python, {}
    if contender.program != "vllm" or environments.vllm_python is None:
        return None, {}
    environment = vllm_environment(environments.vllm_python, cores) | engine_in_process_environment(cores)
    return environments.vllm_python, environment


def write_gguf_files(model: Path, environments: Environments, file_types: Sequence[str]) -> None:
    """Those that llama.cpp reads, in `model`. Raises PeerError if that fails, or takes too long."""
    if environments.llama_python is None or not file_types:
        return
    script = ROOT / "bench" / "peers" / "gguf_files.py"
    command = (str(environments.llama_python), "-P", str(script), str(model), *file_types)
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=OPEN_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError) as error:
        log = getattr(error, "stderr", None) or b""
        raise PeerError(f"no GGUF files ({error}):\n{log.decode(errors='replace')[-_LOG_TAIL:]}") from error


@contextlib.contextmanager
def closing_all(processes: Sequence[PeerProcess | EngineProcess]) -> Iterator[None]:
    """Ends every one of them when the block ends, however it ends."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.close)
        yield
