"""Load on servers that are started for it, as JSON: `python -m bench.served [--shape NAME] [OPTION of tandem serve …]`.

One worker that does both, then a prefill and a decode worker, on the demo model or on random weights of a shape; then,
of a shape, one mixed step of the engine alone. The loads are those in which an 8B model is compared with vLLM.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.support.cluster import START_TIMEOUT_S, serve
from bench.support.scrape import worker_counters
from bench.workload import LoadOptions, loads_of
from kernels.triton import COMPILED
from tandem.client import Client

DEMO = "demo"
SERVERS = {"1 worker": ("--workers", "1"), "1 prefill + 1 decode": ("--prefill", "1", "--decode", "1")}
_TIMEOUT_S = 60.0
"""Of one request."""


@contextmanager
def checkpoint(shape: str) -> Iterator[str]:
    """The demo model, or a folder with random weights until the block ends."""
    if shape == DEMO:
        yield DEMO
        return
    from bench.support.checkpoints import PEER_SHAPES, write_checkpoint  # needs transformers

    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            write_checkpoint(PEER_SHAPES[shape], Path(folder))
        torch.cuda.empty_cache()
        yield folder


def measure(model: str, options: Sequence[str], loads: Sequence[LoadOptions]) -> list[dict[str, Any]]:
    """Returns the figures of `tandem bench` for each load on one server, and its `steps_between`.

    Raises RuntimeError if a request failed or waited for a compiler.
    """
    found = []
    with serve(model, *options) as cluster:
        with Client(cluster.target) as client:
            client.wait_ready(START_TIMEOUT_S)
            admin_address = client.status().admin_address
        for load in loads:
            before = worker_counters(admin_address)
            figures = run_load(cluster.target, load)
            if figures["errors"]:
                raise RuntimeError(f"requests failed: {figures['errors']}")
            found.append(figures | {"steps": steps_between(before, worker_counters(admin_address))})
    if compiled := [line for line in cluster.log if COMPILED in line]:
        raise RuntimeError(compiled[0])
    return found


def steps_between(before: Counter[str], after: Counter[str]) -> dict[str, Any]:
    """Returns number and mean of the steps of each kind, how many ran as CUDA graphs, and what was captured."""
    grown = after - before
    steps: dict[str, Any] = {}
    for kind in ("prefill", "decode", "mixed"):
        if num_steps := grown[f"tandem_step_seconds_count{{{kind}}}"]:
            mean_ms = 1e3 * grown[f"tandem_step_seconds_sum{{{kind}}}"] / num_steps
            steps[kind] = {"steps": num_steps, "mean_ms": mean_ms}
    captured = {name: count for name, count in after.items() if name.startswith("tandem_cuda_graphs")}
    return steps | {"graphs": captured | {name: count for name, count in grown.items() if "cuda_graph_steps" in name}}


def run_load(target: str, load: LoadOptions) -> dict[str, Any]:
    """Runs `tandem bench` against `target`; returns its JSON without single requests. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ("--target", target, "--timeout-seconds", f"{_TIMEOUT_S:g}", *load.arguments, "--json", str(report))
        subprocess.run((sys.executable, "-m", "cli.main", "bench", *options), check=True, stdout=sys.stderr)
        figures: dict[str, Any] = json.loads(report.read_text())
    del figures["requests"]
    return figures


def main(arguments: list[str]) -> int:
    """Prints each server's reports by its name, without single requests."""
    parser = argparse.ArgumentParser(prog="python -m bench.served", description=__doc__)
    parser.add_argument("--shape", default=DEMO, help="demo, or one of bench.support.checkpoints")
    parser.add_argument("--device", default="auto", help="see `tandem serve`")
    args, options = parser.parse_known_args(arguments)
    loads, options = loads_of(args.shape), [*options, "--device", args.device]
    with checkpoint(args.shape) as model:
        worker, pair = SERVERS
        found = {
            "model": args.shape,
            "servers": {
                worker: measure(model, [*SERVERS[worker], *options], loads),
                pair: measure(model, [*SERVERS[pair], *options], loads[:1]),
            },
        }
        if args.shape != DEMO:
            from bench.mixed_step import measure_mixed  # needs transformers

            found["mixed_step"] = asdict(measure_mixed(Path(model), args.device))
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
