"""Runs the benchmarks of serving one after the other and records them: `python -m bench.record`.

Writes `bench/results/cpu.json` (figures, machine, versions, date) and renders the page from it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.support.machine import describe_machine, today
from shell.progress import show_on_terminal, track

RUNS: dict[str, list[str]] = {
    "batching": ["bench.batching", "--requests", "192"],
    "overhead": ["bench.overhead", "--repeats", "5"],
    "release": ["bench.release"],
}


def write_record(stem: str, results: dict[str, Any]) -> None:
    """Writes `bench/results/<stem>.json` with machine and date, and renders the page anew."""
    from bench import page  # what all sections need takes seconds to import, in every process that only measures

    record = {"date": today(), "machine": describe_machine(), "results": results}
    (page.RESULTS / f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n")
    page.main()


def commit_of(checkout: Path) -> str:
    """The commit of another checkout, in short."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run_all() -> dict[str, Any]:
    """Every benchmark's JSON. Raises CalledProcessError if one fails."""
    results = {}
    for name, arguments in track(RUNS.items(), "benchmarks"):
        print(f"{name} …", flush=True)
        done = subprocess.run([sys.executable, "-m", *arguments], check=True, capture_output=True, text=True)
        results[name] = json.loads(done.stdout)
    return results


if __name__ == "__main__":
    show_on_terminal()
    write_record("cpu", run_all())
