"""Instructions of one decode step, counted where clocks are noisy: `python -m bench.instructions [--cpu-tier TIER]`.

Runs the engine's step under callgrind (Debian: `apt-get install valgrind`), on one thread, so that no wait is counted.
Loading and warming up run without counting; all takes half a minute. valgrind has no AVX-512: at most the tier avx2.
Prints instructions per step and the functions that took most of them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.peers.process import PeerProcess, closing_all, end_in_order
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.step_timer import StepTimer
from kernels.dispatch import AUTO, select_kernels
from models.loading import load_model

TIERS = ("baseline", "avx2")
_TIMEOUT_S = 3600.0
_READY, _DONE = "ready\n", "done\n"
_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)
_FUNCTIONS = 20
"""Lines of the report that are shown."""


def total_instructions(report: str) -> int:
    """Of a file that callgrind wrote. Raises ValueError if it names no total."""
    found = [int(each) for each in _TOTAL.findall(report)]
    if not found or not max(found):
        raise ValueError("callgrind counted nothing")
    return max(found)


def run_step(model: Path, seqs: int, context: int, tier: str) -> None:
    """The process that is counted: gets ready, waits for a line, runs one step, waits for the end of its input."""
    torch.set_num_threads(1)
    kernels = select_kernels(AUTO, torch.device("cpu"), torch.bfloat16, tier)
    loaded = load_model(model, "bfloat16", torch.device("cpu"), kernels)
    timer = StepTimer(loaded, 16, seqs * (context + 16), kernels)
    step = timer.step(seqs, context, 1)
    timer.run(step)
    sys.stdout.write(_READY)
    sys.stdout.flush()
    sys.stdin.readline()
    timer.run(step)
    sys.stdout.write(_DONE)
    sys.stdout.flush()
    sys.stdin.read()


def count(model: Path, seqs: int, context: int, tier: str, folder: Path) -> Path:
    """The file that callgrind wrote. Raises PeerError, CalledProcessError."""
    report = folder / "callgrind.out"
    command = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={report}", sys.executable)
    step = ("-m", "bench.instructions", "--step-of", str(model))
    shape = ("--seqs", str(seqs), "--context", str(context), "--cpu-tier", tier)
    process = PeerProcess("callgrind", (*command, *step, *shape))
    with closing_all([process]):
        _expect(process, _READY)
        _control(process, "--instr=on")
        process.send("")
        _expect(process, _DONE)
        _control(process, "--instr=off")
        _control(process, "--dump")
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def _expect(process: PeerProcess, line: str) -> None:
    while process.receive(_TIMEOUT_S) != line:
        pass


def _control(process: PeerProcess, what: str) -> None:
    subprocess.run(("callgrind_control", what, str(process.pid)), check=True, capture_output=True, timeout=_TIMEOUT_S)


def main() -> int:
    """Counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--seqs", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--cpu-tier", choices=TIERS, default=TIERS[-1])
    parser.add_argument("--step-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step_of is not None:
        run_step(args.step_of, args.seqs, args.context, args.cpu_tier)
        return 0
    end_in_order()
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES[args.shape], Path(model))
        report = count(Path(model), args.seqs, args.context, args.cpu_tier, Path(folder))
        print(f"{total_instructions(report.read_text()) / 1e6:.2f} million instructions in one step")
        shown = subprocess.run(("callgrind_annotate", str(report)), check=True, capture_output=True, text=True).stdout
    functions = [line for line in shown.splitlines() if re.match(r"\s*[\d,]+ \(", line)]
    print("\n".join(functions[:_FUNCTIONS]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
