"""Two checkouts against each other on one machine: `python -m bench.before_after BASE_DIR`.

BASE_DIR is a checkout that is installed (`make install`); this checkout is the other side. Both do the same work
in turns, round after round, and the side that begins changes, so that the machine's drift hits both alike:
idle time of the engine, what a worker's end of the stream costs, what router and hand-off add, decode steps of
the engine, first token and throughput through `tandem serve`. Files visited and lines are counted once. Prints a
table of medians and ratios and writes `bench/results/before-after.json`. Takes about ten minutes where nothing
else runs.

Each side runs its own benchmarks with its own interpreter. Benchmarks that the base does not have yet are
added to a copy of its `bench/`, which lies in a temporary folder: the base itself is not touched.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import lines
from bench.peers.job import Job
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.machine import describe_machine, today
from bench.support.markdown import table

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench" / "results" / "before-after.json"
SIDES = ("before", "after")
TIMEOUT_S = 600.0
_ADDED = ("idle.py", "served_alone.py", "stream_cost.py", "walk.py", "walk_probe.py", "walk_windows.py")
"""What a base may not have yet."""
_THREADS = 2
_LOG_TAIL = 2000

Figures = dict[str, float]
"""By name, the unit in it."""


@dataclass(frozen=True, slots=True)
class Work:
    """How much is measured."""

    rounds: int
    shape: str
    """One of `PEER_SHAPES`."""
    idle: tuple[str, ...]
    overhead: tuple[str, ...]
    served: tuple[str, ...]
    jobs: tuple[Job, ...]
    walk: tuple[str, ...] = ()


def _job(num_seqs: int, prompt_tokens: int, decode_steps: int) -> Job:
    return Job(num_seqs, prompt_tokens, decode_steps, budget_tokens=2048, seed=num_seqs)


_WARM_UP = _job(4, 192, 4)
FULL = Work(
    rounds=3,
    shape="135m",
    idle=("--repeats", "2"),
    overhead=("--repeats", "2"),
    served=(),
    jobs=(_job(1, 256, 32), _job(16, 256, 16), _job(64, 256, 10)),
)
QUICK = Work(
    rounds=1,
    shape="smoke",
    idle=("--repeats", "1", "--output-tokens", "32"),
    overhead=("--repeats", "1"),
    served=("--streams", "4", "--prompt-tokens", "64", "--output-tokens", "16"),
    jobs=(_job(1, 64, 8), _job(16, 64, 8)),
    walk=("--requests", "4"),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One checkout: where its benchmarks are run, and with which interpreter."""

    name: str
    checkout: Path
    python: Path
    folder: Path
    """Holds the `bench/` that is run; first on the module path, the checkout second."""

    def run(self, module: str, *arguments: str, stdin: str = "") -> str:
        """Standard output of `python -m module`. Raises RuntimeError with the end of its log if it fails."""
        done = subprocess.run(
            (str(self.python), "-m", module, *arguments),
            cwd=self.folder,
            # Not the caller's: it would put one side's code under the other's name.
            env={**os.environ, "PYTHONPATH": f"{self.folder}{os.pathsep}{self.checkout}"},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: {module} ended with {done.returncode}:\n{done.stderr[-_LOG_TAIL:]}")
        return done.stdout


@dataclass(slots=True)
class Measured:
    """All rounds of both sides."""

    rounds: dict[str, list[Figures]] = field(default_factory=lambda: {side: [] for side in SIDES})

    def values(self, side: str, figure: str) -> list[float]:
        """One per round."""
        return [each[figure] for each in self.rounds[side]]

    @property
    def figures(self) -> list[str]:
        """Those that both sides have, in the order in which they were measured."""
        return [each for each in self.rounds["before"][0] if each in self.rounds["after"][0]]

    def medians(self, figure: str) -> tuple[float, float]:
        """Before and after."""
        before, after = (statistics.median(self.values(side, figure)) for side in SIDES)
        return before, after

    def ratios(self, figure: str) -> list[float]:
        """After by before, of each round in which there is one."""
        pairs = zip(self.values("before", figure), self.values("after", figure), strict=True)
        return [found for pair in pairs if (found := ratio(*pair)) is not None]


def ratio(before: float, after: float) -> float | None:
    """None where noise is larger than the figure: a difference of two measurements may come out below zero."""
    return after / before if before > 0 and after > 0 else None


def base_side(base: Path, folder: Path) -> Side:
    """The base, with its benchmarks copied into `folder` and what it lacks beside them."""
    shutil.copytree(base / "bench", folder / "bench", ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in _ADDED:
        if not (folder / "bench" / name).exists():
            shutil.copy(ROOT / "bench" / name, folder / "bench" / name)
    return Side("before", base, base / ".venv" / "bin" / "python", folder)


def measure_round(side: Side, work: Work, model: Path) -> Figures:
    """Everything that takes time, once. Raises RuntimeError."""
    return {
        **_idle(side, work),
        **_stream_cost(side),
        **_overhead(side, work),
        **_steps(side, work, model),
        **_served(side, work, model),
    }


def _idle(side: Side, work: Work) -> Figures:
    figures: Figures = {}
    for each in json.loads(side.run("bench.idle", *work.idle)):
        name = f"engine idle between steps, {each['num_seqs']} seqs"
        figures[f"{name}, p50 ms"] = each["idle_p50_ms"]
        figures[f"{name}, p90 ms"] = each["idle_p90_ms"]
        figures[f"{name}, share"] = each["idle_share"]
    return figures


def _stream_cost(side: Side) -> Figures:
    found = json.loads(side.run("bench.stream_cost"))
    return {f"tokens to messages in the worker, {found['handles']} requests, µs per token": found["us_per_token"]}


def _overhead(side: Side, work: Work) -> Figures:
    found = json.loads(side.run("bench.overhead", *work.overhead))
    if not found["tokens_equal"]:
        raise RuntimeError(f"{side.name}: served tokens are not the engine's")
    return {
        "added per token, p50 ms": found["added_per_token_p50_ms"],
        "added per token, mean ms": found["added_per_token_mean_ms"],
        "added to the first token, ms": found["added_to_first_token_ms"],
        "hand-off, ms": found["transfer_ms"],
    }


def _steps(side: Side, work: Work, model: Path) -> Figures:
    jobs = "".join(json.dumps(asdict(job)) + "\n" for job in (_WARM_UP, *work.jobs))
    answers = side.run("bench.peers.tandem_engine", str(model), str(_THREADS), stdin=jobs).splitlines()
    times = [json.loads(answer) for answer in answers[2:]]  # after the engine's facts and the warm-up
    figures: Figures = {}
    for job, each in zip(work.jobs, times, strict=True):
        name = f"{job.num_seqs} × {job.prompt_tokens}"
        figures[f"decode step, {name}, ms"] = statistics.median(each["step_s"]) * 1e3
        figures[f"prefill, {name}, tokens/s"] = job.num_seqs * job.prompt_tokens / each["prefill_s"]
    return figures


def _served(side: Side, work: Work, model: Path) -> Figures:
    figures: Figures = {}
    for name, each in json.loads(side.run("bench.served_alone", str(model), *work.served)).items():
        figures[f"{name}: throughput, tokens/s"] = each["tokens_per_s"]
        figures[f"{name}: first token of one request, ms"] = each["first_token_ms"]
        figures[f"{name}: between tokens of one request, ms"] = each["alone_gap_ms"]
        figures[f"{name}: between tokens of all streams, ms"] = each["together_gap_ms"]
    return figures


def measure(sides: Sequence[Side], work: Work) -> Measured:
    """All rounds. Raises RuntimeError."""
    measured = Measured()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_checkpoint(PEER_SHAPES[work.shape], model)
        for number in range(work.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                print(f"round {number + 1} of {work.rounds}: {side.name} …", file=sys.stderr, flush=True)
                measured.rounds[side.name].append(measure_round(side, work, model))
    return measured


def count_files(sides: Sequence[Side], work: Work) -> dict[str, dict[str, Any]]:
    """What `bench.walk` says of each side, by side; both at once, for nothing is timed."""
    print("files visited …", file=sys.stderr, flush=True)
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda side: json.loads(side.run("bench.walk", "--json", *work.walk)), sides)
        return {side.name: walks for side, walks in zip(sides, found, strict=True)}


def timed_table(measured: Measured) -> str:
    """Medians over the rounds, the ratio of the medians, and the least and largest ratio of a round."""
    rows = []
    for figure in measured.figures:
        before, after = measured.medians(figure)
        whole, single = ratio(before, after), measured.ratios(figure)
        spread = f"{min(single):.2f} to {max(single):.2f}" if single else "–"
        rows.append([figure, f"{before:.3g}", f"{after:.3g}", "–" if whole is None else f"{whole:.2f}", spread])
    return table(("figure", *SIDES, "after / before", "in single rounds"), rows)


def counted_table(walks: Mapping[str, Mapping[str, Any]]) -> str:
    """Files of each way."""
    rows = [[way, *(str(walks[side].get(way, {}).get("num_files", "–")) for side in SIDES)] for way in walks["before"]]
    return table(("files visited", *SIDES), rows)


def _medians(measured: Measured) -> dict[str, dict[str, float | None]]:
    """By figure."""
    pairs = {figure: measured.medians(figure) for figure in measured.figures}
    return {name: {"before": pair[0], "after": pair[1], "ratio": ratio(*pair)} for name, pair in pairs.items()}


def _revision(checkout: Path) -> str:
    """Commit, with `-dirty` if files differ from it."""
    command = ("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Measures, prints, records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="BASE_DIR")
    parser.add_argument("--rounds", type=int, help="of everything that is timed")
    parser.add_argument("--quick", action="store_true", help="only shows that everything runs; records nothing")
    parser.add_argument("--out", type=Path, help=f"instead of {RECORD.relative_to(ROOT)}")
    args = parser.parse_args()
    work = QUICK if args.quick else FULL
    if args.rounds is not None:
        work = replace(work, rounds=args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        after = Side("after", ROOT, Path(sys.executable), ROOT)
        sides = (base_side(args.base.resolve(), Path(folder)), after)
        measured = measure(sides, work)
        walks = count_files(sides, work)
    sizes = {side.name: lines.count(str(side.checkout)) for side in sides}
    print("\n".join((timed_table(measured), counted_table(walks), lines.as_markdown(sizes))))
    record = {
        "date": today(),
        "machine": describe_machine(),
        "revisions": {side.name: _revision(side.checkout) for side in sides},
        "medians": _medians(measured),
        "rounds": measured.rounds,
        "lines": {name: {room: asdict(size) for room, size in each.items()} for name, each in sizes.items()},
        "walk": walks,
    }
    out = args.out or (None if args.quick else RECORD)
    if out is not None:
        out.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
