"""How many tokens one router passes on, per core: `python -m bench.router_tokens [BASE_DIR …] [--record]`.

Workers without an engine send one token for each of many streams per step; clients in a third process read them. What
counts is the router process's processor time per token while every token still is a message of its own: 1 s divided
by that is what one core passes on. Beside it the floor: a bare grpc.aio server that writes the same messages and does
nothing else. BASE_DIR: other checkouts, whose routers take turns with this one's: the figures before a change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.record import write_record
from bench.support.markdown import table
from bench.support.ports import free_ports
from bench.token_stubs import Load

ROOT = Path(__file__).resolve().parents[1]
FLOOR = "bare grpc.aio server"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Taken:
    """One run of one server."""

    server: str
    workers: int
    streams: int
    tokens: int
    messages: int
    seconds: float
    """From the first step to the last one."""
    cpu_s: float
    """Of the server's process, meanwhile."""

    @property
    def us_per_token(self) -> float:
        """Processor time."""
        return self.cpu_s / self.tokens * 1e6


def run(server: str, commands: Sequence[Sequence[str]], load: Load, checkout: Path) -> Taken:
    """One run against `commands`, servers that say nothing, or the floor, which says its port."""
    is_floor = server == FLOOR
    if is_floor:
        commands = ((sys.executable, "-m", "bench.token_stubs", "floor", load.argument),)
    with contextlib.ExitStack() as servers:
        serving = [servers.enter_context(_process(command, checkout)) for command in commands]
        source = serving[0]
        with contextlib.ExitStack() as stack:
            if is_floor:
                load = replace(load, target=f"127.0.0.1:{_line(source)['port']}")
            else:
                for each in serving:
                    _ready(each)
                source = stack.enter_context(_stub("workers", load))
                _line(source)  # all are connected: streams are dealt out among all
            reading = stack.enter_context(_stub("clients", load))
            began_s, began_cpu_s = _line(source)["begin"], _cpu_s(serving)
            ended_s, ended_cpu_s = _line(source)["end"], _cpu_s(serving)
            counts = _line(reading)
            ended_cpu_s = max(ended_cpu_s, _cpu_s(serving))
        figures = counts["tokens"], counts["messages"], ended_s - began_s, ended_cpu_s - began_cpu_s
        return Taken(server, load.workers, load.streams, *figures)


def router_command(load: Load, *options: str) -> tuple[str, ...]:
    """The router that `load` calls."""
    bounds = ("--max-active-requests", str(load.streams), "--max-queued-requests", str(load.streams))
    own = ("--model", load.model, "--admin-listen", "none", "--log-level", "warning")
    return (sys.executable, "-m", "cli.main", "router", *own, *bounds, *options)


def _stub(role: str, load: Load) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return _process((sys.executable, "-m", "bench.token_stubs", role, load.argument), ROOT)


@contextlib.contextmanager
def _process(command: Sequence[str], checkout: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if not process.stdout.readline().startswith("ready "):
        raise RuntimeError("the router did not get ready")


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it says next. Raises RuntimeError if it has ended."""
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise RuntimeError(f"{process.args!r} ended")
    line: dict[str, Any] = json.loads(text)
    return line


def _cpu_s(processes: Sequence[subprocess.Popen[str]]) -> float:
    """Processor time of all threads so far."""
    fields = [Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split() for each in processes]
    return sum(int(each[11]) + int(each[12]) for each in fields) / _TICKS_PER_S


def measure(
    loads: Sequence[Load], bases: Sequence[Path], rounds: int, merged_s: float, num_routers: int
) -> list[Taken]:
    """All servers in turns; of this checkout also a router that merges, and several that share a port."""
    merging, several = f"router --stream-interval-seconds {merged_s:g}", f"{num_routers} routers on one port"
    checkouts = {f"router, {base.name}": base for base in bases} | dict.fromkeys(("router", merging, several), ROOT)
    taken = []
    for _ in range(rounds):
        for each in loads:
            for server, checkout in checkouts.items():
                target, *own = (f"127.0.0.1:{port}" for port in free_ports(1 + num_routers))
                load = replace(each, target=target, routers=tuple(own) if server == several else ())
                listen = ("--listen", target)
                commands = [router_command(load, *listen, *(server.split()[1:] if server == merging else ()))]
                if server == several:
                    commands = [router_command(load, "--shared-listen", target, "--listen", each) for each in own]
                taken.append(run(server, commands, load, checkout))
                print(render(taken[-1:]), file=sys.stderr)
        taken.append(run(FLOOR, (), loads[0], ROOT))
        print(render(taken[-1:]), file=sys.stderr)
    return taken


def summary(taken: Sequence[Taken]) -> list[dict[str, Any]]:
    """Medians by server and number of workers."""
    rows = []
    for server, workers in dict.fromkeys((each.server, each.workers) for each in taken):
        same = [each for each in taken if (each.server, each.workers) == (server, workers)]
        us_per_token = statistics.median(each.us_per_token for each in same)
        rows.append(
            {
                "server": server,
                "workers": 0 if server == FLOOR else workers,
                "streams": same[0].streams,
                "us_per_token": us_per_token,
                "tokens_per_core_s": 1e6 / us_per_token,
                "messages_per_token": statistics.median(each.messages / each.tokens for each in same),
                "tokens_per_s": statistics.median(each.tokens / each.seconds for each in same),
            }
        )
    return rows


def render(taken: Sequence[Taken]) -> str:
    """The figures, for people."""
    rows = [
        (
            *(each["server"], str(each["workers"]), str(each["streams"]), f"{each['us_per_token']:.1f}"),
            *(f"{each['tokens_per_core_s']:.0f}", f"{each['messages_per_token']:.2f}", f"{each['tokens_per_s']:.0f}"),
        )
        for each in summary(taken)
    ]
    header = ("server", "workers", "streams", "µs of CPU per token", "tokens/s per core", "messages/token", "tokens/s")
    return table(header, rows)


def main() -> int:
    """Runs, prints, records."""
    parser = argparse.ArgumentParser(prog="python -m bench.router_tokens", description=__doc__)
    parser.add_argument("bases", nargs="*", type=Path, help="other checkouts to compare with")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 64, 1000])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=60, help="tokens of each stream")
    parser.add_argument("--interval-ms", type=float, default=125.0, help="between a worker's steps")
    parser.add_argument("--connections", type=int, default=16, help="of the clients")
    parser.add_argument(
        "--merged-s", type=float, default=1.0, help="--stream-interval-seconds of the router that merges"
    )
    parser.add_argument("--routers", type=int, default=2, help="that share one port")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write bench/results/router-tokens.json and the page")
    options = parser.parse_args()
    shape = (options.streams, options.steps, options.interval_ms / 1e3, options.connections)
    loads = [Load("demo", "", workers, *shape) for workers in options.workers]
    taken = measure(
        loads, [base.resolve() for base in options.bases], options.rounds, options.merged_s, options.routers
    )
    print(render(taken))
    if options.record:
        write_record("router-tokens", {"load": asdict(loads[0]), "rows": summary(taken)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
