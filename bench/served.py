"""Load on servers that are started for it, as JSON: `python -m bench.served [--shape NAME] [OPTION of tandem serve …]`.

A prefill and a decode worker, then one worker that does both, one after the other, on the demo model or on random
weights of a shape.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.support.cluster import START_TIMEOUT_S, serve
from bench.workload import LoadOptions
from kernels.triton import COMPILED
from tandem.client import Client

DEMO = "demo"
SERVERS = {"1 prefill + 1 decode": ("--prefill", "1", "--decode", "1"), "1 worker": ("--workers", "1")}
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


def measure(model: str, options: list[str], load: LoadOptions) -> dict[str, Any]:
    """Returns the figures of `tandem bench`. Raises RuntimeError if a request failed or waited for a compiler."""
    with serve(model, *options) as cluster:
        with Client(cluster.target) as client:
            client.wait_ready(START_TIMEOUT_S)
        figures = run_load(cluster.target, load)
    if compiled := [line for line in cluster.log if COMPILED in line]:
        raise RuntimeError(compiled[0])
    if figures["errors"]:
        raise RuntimeError(f"requests failed: {figures['errors']}")
    return figures


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
    """Prints each server's report by its name, without single requests."""
    parser = argparse.ArgumentParser(prog="python -m bench.served", description=__doc__)
    parser.add_argument("--shape", default=DEMO, help="demo, or one of bench.support.checkpoints")
    parser.add_argument("--callers", type=int, default=16, help="each sends its next request when one has ended")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    args, options = parser.parse_known_args(arguments)
    load = LoadOptions(
        concurrency=args.callers,
        num_requests=args.requests,
        num_warmup=8,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
    )
    with checkpoint(args.shape) as model:
        servers = {name: measure(model, [*roles, *options], load) for name, roles in SERVERS.items()}
    print(json.dumps({"model": args.shape, "servers": servers}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
