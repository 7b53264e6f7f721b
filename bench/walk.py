"""Counts the files that a request visits on its way in, and its tokens on their way out: `python -m bench.walk`.

Measured, not estimated: router and workers run the demo model as processes of their own, each under
`bench.walk_probe`; requests are sent one at a time, and what ran in the windows of `bench.walk_windows`
is counted if it ran for most of them.

A file counts if a function of it ran that is neither a constructor nor a property: an object that is made
ready for later, or asked for one of its values, is not visited. Counted are the files of the rooms that hold requests
(`COUNTED`). Libraries and words that the rooms call (`engine/`, `kvtransfer/`, the rest of `tandem/`) are listed
beside them, telemetry too: so a file that moves from a room to a library still shows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.support.markdown import table
from bench.walk_probe import Trace
from bench.walk_windows import ROUTER, Files, Process, Spans, way_in, way_out
from tandem.client import AsyncClient

MODEL = "demo"
COUNTED = ("router/", "prefill_worker/", "decode_worker/", "worker/")
_TELEMETRY = (
    "shell/telemetry/",
    "router/metrics.py",
    "router/request_spans.py",
    "worker/serving/metrics.py",
    "worker/serving/spans.py",
)
_PREFILL, _DECODE = "prefill_worker", "decode_worker"
_READY_S = 60.0
_STOP_S = 60.0
_PAUSE_S = 0.2
"""Between requests, and up to half as much again: what the last one left behind comes to its end."""
_STRIDE = 0.618
"""Of the pauses' lengths within that half: requests keep no time with what runs at a fixed rate."""
_WARM_UP = 2
_LOCAL = ("--local-prefill-tokens", "unlimited")


@dataclass(frozen=True, slots=True)
class Walk:
    """One way, and the files that it visits."""

    name: str
    files: Files

    @property
    def counted(self) -> Files:
        """Of the rooms that hold requests."""
        return {
            file: names
            for file, names in self.files.items()
            if file.startswith(COUNTED) and not file.startswith(_TELEMETRY)
        }

    @property
    def telemetry(self) -> Files:
        """Of those who watch."""
        return {file: names for file, names in self.files.items() if file.startswith(_TELEMETRY)}

    @property
    def called(self) -> Files:
        """All others: libraries and shared words."""
        return {file: names for file, names in self.files.items() if not file.startswith((*COUNTED, *_TELEMETRY))}


def measure(num_requests: int) -> list[Walk]:
    """Both ways in, and the way out."""
    pair, pair_spans = _run((_PREFILL, _DECODE), (), num_requests)
    alone, alone_spans = _run((_DECODE,), _LOCAL, num_requests)
    return [
        Walk("way in, prompt computed by the decode worker", way_in(alone, alone_spans)),
        Walk("way in, prompt computed by a prefill worker", way_in(pair, pair_spans)),
        Walk("way out", way_out(pair, _DECODE, pair_spans)),
    ]


def _run(workers: Sequence[str], options: Sequence[str], num_requests: int) -> tuple[dict[str, Process], Spans]:
    """Starts a router and workers, sends requests, stops them; what each process ran, by its module."""
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder)
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(_probed(traces, ROUTER, "--listen", "127.0.0.1:0"))
            for worker in workers:
                given = options if worker == _DECODE else ()
                stack.enter_context(_probed(traces, worker, "--router", address, "--threads", "1", *given))
            spans = asyncio.run(_send(address, num_requests))
        return {name: Process.of(Trace.read(traces / name)) for name in (ROUTER, *workers)}, spans


@contextlib.contextmanager
def _probed(traces: Path, module: str, *arguments: str) -> Iterator[str]:
    """Runs `python -m module` under the probe until the block ends; gives its address. Its trace is there then."""
    command = (sys.executable, "-m", "bench.walk_probe", str(traces / module), module, "--model", MODEL, *arguments)
    with (traces / f"{module}.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            word, _, address = process.stdout.readline().strip().partition(" ")
            if word != "ready":
                log.seek(0)
                raise RuntimeError(f"{module} did not get ready:\n{log.read()}")
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            finally:
                process.kill()


async def _send(address: str, num_requests: int) -> Spans:
    """One greedy stream after the other, with a stop string that does not come."""
    spans = []
    async with AsyncClient(address) as client:
        await client.wait_ready(timeout_s=_READY_S)
        for number in range(_WARM_UP + num_requests):
            await asyncio.sleep(_PAUSE_S * (1 + number * _STRIDE % 1 / 2))
            begin_ns = time.monotonic_ns()
            stream = client.generate(
                "Once upon a time there was a small town.",
                max_tokens=16,
                temperature=0.0,
                ignore_eos=True,
                stop="zzz",
                timeout_s=_READY_S,
            )
            async for _ in stream:
                pass
            spans.append((begin_ns, time.monotonic_ns()))
    return spans[_WARM_UP:]


def as_json(walks: Sequence[Walk]) -> str:
    """Counts and lists."""
    document = {
        walk.name: {
            "num_files": len(walk.counted),
            "num_files_called": len(walk.called),
            "num_telemetry_files": len(walk.telemetry),
            "files": walk.counted,
            "called": walk.called,
            "telemetry": walk.telemetry,
        }
        for walk in walks
    }
    return json.dumps(document, indent=2)


def as_markdown(walks: Sequence[Walk]) -> str:
    """A table of the counts, and the lists."""
    rows = [[walk.name, str(len(walk.counted)), str(len(walk.called)), str(len(walk.telemetry))] for walk in walks]
    parts = [table(("way", "files of rooms", "libraries and words", "telemetry"), rows)]
    for walk in walks:
        parts.append(f"\n{walk.name}: {', '.join(walk.counted)}; calls {', '.join(walk.called)}\n")
    return "".join(parts)


def main() -> int:
    """Prints the counts and the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="JSON, with the functions of each file")
    args = parser.parse_args()
    walks = measure(args.requests)
    print(as_json(walks) if args.json else as_markdown(walks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
