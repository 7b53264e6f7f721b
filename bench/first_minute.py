"""From a fresh clone to the first streamed answer: `python -m bench.first_minute [--record]`.

Clones HEAD into an empty folder and runs `make demo` there. Prints each stage with its seconds, the processor seconds
of its processes and the size of the folder after it: the clone; the install of environment, packages and native
kernels; the demo until its first answer; the demo until its end. Aims on two quiet cores with torch's wheel on disk:
90 s and 120 processor seconds until the first answer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.support.machine import write_record
from bench.support.markdown import table

ROOT = Path(__file__).resolve().parents[1]
_INSTALLED = ".venv/.demo"
_ANSWERED = "first token"
"""Stands in the line behind an answer of the demo."""

Stage = dict[str, float]


class Stages:
    """The stages so far; each begins where the one before ended."""

    def __init__(self, folder: Path) -> None:
        self.rows: dict[str, Stage] = {}
        self._folder = folder
        self._began_s, self._spent_s = time.monotonic(), _processor_s()

    def end(self, name: str) -> None:
        """Ends a stage. Its processor seconds are those of processes that have ended in it."""
        now_s, spent_s = time.monotonic(), _processor_s()
        seconds, processor_s = now_s - self._began_s, spent_s - self._spent_s
        used = subprocess.run(("du", "-sm", self._folder), capture_output=True, text=True, check=True)
        self.rows[name] = {
            "s": round(seconds, 1),
            "processor_s": round(processor_s, 1),
            "mib": int(used.stdout.split()[0]),
        }
        self._began_s, self._spent_s = time.monotonic(), _processor_s()


def _processor_s() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def measure(folder: Path) -> dict[str, Stage]:
    """Returns the stages in an empty folder. Raises CalledProcessError, and RuntimeError without an answer."""
    stages = Stages(folder)
    subprocess.run(("git", "clone", "-q", str(ROOT), str(folder)), check=True)
    stages.end("clone")
    subprocess.run(("make", "-s", _INSTALLED), cwd=folder, check=True, stdout=sys.stderr)
    stages.end("install")
    with subprocess.Popen(("make", "-s", "demo"), cwd=folder, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if _ANSWERED in line and "first answer" not in stages.rows:
                stages.end("first answer")
    if demo.returncode or "first answer" not in stages.rows:
        raise RuntimeError(f"the demo ended with exit code {demo.returncode}")
    stages.end("end of the demo")
    return stages.rows


def main() -> int:
    """Prints the stages; 1 if the aims are missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_minute", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write bench/results/first-minute.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    print(table(("stage", "s", "processor s", "MiB"), [(name, *map(str, row.values())) for name, row in rows.items()]))
    first_s = sum(row["s"] for name, row in rows.items() if name != "end of the demo")
    processor_s = sum(row["processor_s"] for row in rows.values())
    print(f"first answer after {first_s:.0f} s; {processor_s:.0f} processor seconds with the rest of the demo")
    results: dict[str, Any] = {
        "stages": rows,
        "first_answer_s": round(first_s, 1),
        "processor_s": round(processor_s, 1),
    }
    if args.record:
        write_record("first-minute", results)
    return int(first_s > 90 or processor_s > 120)


if __name__ == "__main__":
    sys.exit(main())
