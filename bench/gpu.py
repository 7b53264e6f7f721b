"""All that only a GPU can show, in one command of less than ten minutes: `python -m bench.gpu`, or `make gpu`.

Needs no network. Each part is a process of its own with a time limit; one that fails, hangs or lacks a library does not
stop the others. Where `vllm` imports, its engine runs the served loads too, in two minutes and a half more. Writes
`bench/results/gpu.json` after each part; exits 1 if one failed, or if there is no GPU. `--dry-run` serves a tiny model
on the CPU instead and writes nothing: it shows that the commands still run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch

from bench.support.machine import describe_gpu, write_record
from kvtransfer.transports import available_between

DEVICE = "cuda:0"
NOT_MEASURED = "not measured: no GPU"
_PYTHON = (sys.executable, "-m")
_LAST_WORDS_CHARS = 400
_TESTS = ("tests/kernels", "tests/unit/engine")
"""Where tests marked `gpu` are; others import what a machine for measuring need not have."""
_TEST_PROCESSES = 12
"""Each compiles kernels on a core of its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """One command, and the most time that it may take."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    gives_json: bool = False
    """Whether its standard output is its result."""
    is_timed: bool = True
    """Whether its figures are times: such a part runs alone."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part."""

    name: str
    command: str
    succeeded: bool
    seconds: float
    last_words: str
    """The end of what it printed: a summary, or why it failed."""
    result: Any = None
    """Its figures, if it gives any."""


def parts(transports: Sequence[str]) -> tuple[Part, ...]:
    """In the order of what is wanted first if time runs out; `transports` are those that work between workers here."""
    systems = [argument for name in (*transports, "colocated") for argument in ("--system", name)]
    exactness = ("bench.exactness", "--model", "demo", "--device", "cuda", "--longest", "1024", *systems)
    transfer = ("bench.transfer", "--device", "cuda", "--block-kib", "368,4096", "--rounds", "5")
    served, *beside = served_parts("8b", "cuda")
    one_setting = ("--block-size", "16", "--chunk-tokens", "512")
    in_parallel = ("-p", "no:benchmark", "-n", str(min(_TEST_PROCESSES, len(os.sched_getaffinity(0)))))
    # A machine for measuring may lack the plug-in for asyncio, whose settings pytest then does not know.
    lenient = ("-W", "ignore::pytest.PytestConfigWarning")
    return (
        Part(
            "tests",
            (*_PYTHON, "pytest", "-p", "no:cacheprovider", *lenient, *in_parallel, "-m", "gpu", *_TESTS),
            110.0,
            is_timed=False,
        ),
        Part("exactness", (*_PYTHON, *exactness, *one_setting), 110.0, is_timed=False),
        Part("kernels", (*_PYTHON, "bench.kernels", "--device", "cuda"), 160.0),
        served,
        *(Part("transfer", (*_PYTHON, *transfer, "--transports", name), 25.0, gives_json=True) for name in transports),
        *beside,
    )


def served_parts(shape: str, device: str) -> tuple[Part, ...]:
    """Loads on Tandem's servers, and on vLLM's engine where there is one."""
    served = ("bench.served", "--shape", shape, "--device", device, "--no-prefix-cache")
    ours = Part("served", (*_PYTHON, *served), 190.0, gives_json=True)
    if find_spec("vllm") is None:
        return (ours,)
    return ours, Part("vllm", (*_PYTHON, "bench.vllm_loads", "--shape", shape), 150.0, gives_json=True)


def run_parts(wanted: Sequence[Part], keep: Callable[[Sequence[Outcome]], None] = lambda _: None) -> list[Outcome]:
    """Those that are not timed together, then the others one after the other; outcomes are printed as they come.

    All that there are go to `keep` each time that there are more.
    """
    untimed = [part for part in wanted if not part.is_timed]
    with ThreadPoolExecutor(max_workers=max(1, len(untimed))) as threads:
        outcomes = list(threads.map(_run_and_tell, untimed))
    keep(outcomes)
    for part in wanted:
        if part.is_timed:
            outcomes.append(_run_and_tell(part))
            keep(outcomes)
    return outcomes


def _run_and_tell(part: Part) -> Outcome:
    print(f"{part.name} (at most {part.limit_s:g} s) …", flush=True)
    outcome = run_part(part)
    how = "done" if outcome.succeeded else "FAILED"
    print(f"  {part.name} {how} in {outcome.seconds:.0f} s: {outcome.last_words}", flush=True)
    return outcome


def run_part(part: Part) -> Outcome:
    """Runs it to its end or its limit; nothing of it runs on afterwards."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        part.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=part.limit_s)
        ended = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children too, which hold its pipes
        out, err = process.communicate()
        ended = f"killed after {part.limit_s:g} s, its limit"
    succeeded, result = process.returncode == 0, None
    words = _last_words(out) if succeeded else f"{ended}; {_last_words(err) or _last_words(out)}"
    if succeeded and part.gives_json:
        try:
            result, words = json.loads(out), "measured"
        except ValueError:
            succeeded, words = False, f"no figures: {words}"
    return Outcome(part.name, " ".join(part.command[2:]), succeeded, time.monotonic() - began_s, words, result)


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LAST_WORDS_CHARS] if lines else ""


def main(arguments: Sequence[str] = ()) -> int:
    """Runs all parts on the first GPU and records them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="the served loads, tiny, on the CPU")
    if parser.parse_args(arguments).dry_run:
        return 0 if all(outcome.succeeded for outcome in run_parts(served_parts("smoke", "cpu"))) else 1
    if not torch.cuda.is_available():
        print(NOT_MEASURED)
        return 1
    num_gpus = torch.cuda.device_count()
    transports = available_between(DEVICE, num_gpus)
    found = {
        "gpu": describe_gpu(torch.device(DEVICE)),
        "num_gpus": num_gpus,
        "transports": [status._asdict() for status in transports],
    }

    def keep(outcomes: Sequence[Outcome]) -> None:
        write_record("gpu", {**found, "parts": [asdict(outcome) for outcome in outcomes]})

    outcomes = run_parts(parts([status.name for status in transports if status.usable]), keep)
    return 0 if all(outcome.succeeded for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
