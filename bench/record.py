"""Runs the benchmarks one after the other and records them: `python -m bench.record`.

Writes `bench/results/cpu.json` (figures, machine, versions, date) and renders
`docs/performance.md` from it, so that no figure is typed by hand. `--render` only renders.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "bench" / "results" / "cpu.json"
PAGE = ROOT / "docs" / "performance.md"
RUNS: dict[str, list[str]] = {
    "batching": ["bench.batching", "--requests", "192"],
    "overhead": ["bench.overhead", "--repeats", "5"],
    "release": ["bench.release"],
    "transfer": ["bench.transfer"],
}


def describe_machine() -> dict[str, str]:
    """What the figures were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "grpcio", "protobuf", "uvloop")},
    }


def run_all() -> dict[str, Any]:
    """Every benchmark's JSON. Raises CalledProcessError if one fails."""
    results = {}
    for name, arguments in RUNS.items():
        print(f"{name} …", flush=True)
        done = subprocess.run([sys.executable, "-m", *arguments], check=True, capture_output=True, text=True)
        results[name] = json.loads(done.stdout)
    return results


def render(record: dict[str, Any]) -> str:
    """The page."""
    machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    results = record["results"]
    batching, overhead = results["batching"], results["overhead"]
    shape = overhead["shape"]
    lines = [
        "# Performance\n",
        "Rendered by `python -m bench.record` from `bench/results/cpu.json`; nothing here is typed by hand.",
        f"Taken {record['date']} on {machine}. Absolute times drift from run to run and from machine to machine;",
        "ratios within one line hold. What was tried and did not help is in [bench/LOG.md](../bench/LOG.md).\n",
        "## Continuous batching (`python -m bench.batching`)\n",
        f"{batching['requests']} requests, exponential output lengths (mean {batching['mean_output_tokens']:.0f}), "
        f"batches of {batching['batch_size']}, demo model.\n",
        _table(
            ("", "tokens/s"),
            [
                ("continuous", f"{batching['continuous_tokens_per_s']:.0f}"),
                ("static batches of the same size", f"{batching['static_tokens_per_s']:.0f}"),
                ("ratio", f"{batching['continuous_over_static']:.2f}"),
            ],
        ),
        f"Unused slots in live blocks at block size 16: mean {batching['unused_slots_mean']:.1%}, "
        f"at most {batching['unused_slots_max']:.1%} in {batching['samples']} samples of the pool's own accounting.\n",
        "## What router and hand-off add (`python -m bench.overhead`)\n",
        f"{shape['streams']} streams of {shape['prompt_tokens']} + {shape['output_tokens']} tokens, demo model, "
        f"{overhead['threads']} compute thread.\n",
        _table(
            ("median, ms", "engine alone", "served", "added"),
            [
                _added("per token", overhead["engine_step_ms"], overhead["served_inter_token_ms"]),
                _added("to the first token", overhead["engine_first_token_ms"], overhead["served_first_token_ms"]),
            ],
        ),
        f"The hand-off moved {overhead['transfer_bytes'] / 1024:.0f} KiB in {overhead['transfer_ms']:.2f} ms.\n",
        "## From a release to all blocks free (`python -m bench.release`)\n",
        _table(
            ("stage", "median, ms", "slowest, ms"),
            [(each["stage"], f"{each['median_ms']:.2f}", f"{each['max_ms']:.2f}") for each in results["release"]],
        ),
        "## Moving blocks between two processes (`python -m bench.transfer`)\n",
        "Copied or received, then read back and compared by checksum.\n",
        _table(
            ("transport", "block, KiB", "median, GB/s", "best, GB/s"),
            [
                (
                    each["transport"],
                    f"{each['block_bytes'] / 1024:.0f}",
                    f"{each['median_gb_per_s']:.2f}",
                    f"{each['best_gb_per_s']:.2f}",
                )
                for each in results["transfer"]["results"]
            ],
        ),
    ]
    return "\n".join(lines)


def _added(name: str, engine_ms: float, served_ms: float) -> tuple[str, ...]:
    return (name, f"{engine_ms:.2f}", f"{served_ms:.2f}", f"{served_ms - engine_ms:.2f}")


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Measures unless told only to render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only render the page from the last record")
    if not parser.parse_args().render:
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        record = {"date": today, "machine": describe_machine(), "results": run_all()}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
    PAGE.write_text(render(json.loads(RECORD.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
