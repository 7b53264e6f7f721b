"""How many requests of a load miss their objectives at one rate: `python -m bench.goodput_at mixed 1.3`.

For changes that are too small for the searches of `bench.goodput`: the same requests, to servers that take turns, none
left early, with the objectives of a record. Several `--seeds` draw other lengths and arrivals; a few requests more or
fewer are noise. `--json FILE` keeps all trials.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from bench.goodput import ARRIVALS_SEED, SERVERS, read_objectives
from bench.goodput_loads import LOADS, arrivals
from bench.goodput_trial import Trial, run_trial
from bench.machine import cpu_tier
from bench.page import RESULTS
from bench.peers.model import PEER_SHAPES, write_checkpoint
from bench.peers.process import end_in_order
from bench.peers.served import open_servers, warm_up
from tandem.cores import usable_cores

_SHAPE = "135m"
_SETTLE_S = 0.5


async def measure(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """Prints a row for each trial; returns them as `Trial.document`, with server and seed."""
    known = {**SERVERS, **{name: shlex.split(options) for name, options in args.variant}}
    servers = {name: known[name] for name in args.servers or known}
    load, vocab_size = LOADS[args.load], PEER_SHAPES[_SHAPE].sizes["vocab_size"]
    objectives = read_objectives(args.objectives)[load.name]
    prompts_seeds = count(1)
    rows = []
    async with open_servers(model, servers, usable_cores(), None) as turns:
        for turn in turns.values():
            async with turn() as client:
                await warm_up(client, vocab_size)
        print(f"{load.name} at {args.rate:g}/s: {objectives}")
        for seed in args.seeds:
            requests = arrivals(load, args.rate, args.requests, seed)
            for name, turn in turns.items():
                async with turn() as client:
                    await asyncio.sleep(_SETTLE_S)
                    trial = await run_trial(
                        client, requests, args.rate, objectives, vocab_size, next(prompts_seeds), leaves_early=False
                    )
                rows.append({"server": name, "seed": seed, **trial.document()})
                print(f"seed {seed:3}  {name:24} {_row(trial)}", flush=True)
    return rows


def _row(trial: Trial) -> str:
    found = trial.document()
    first, between = found["ttft_ms"], found["itl_ms"]
    return (
        f"{trial.requests - trial.attained:3} of {trial.requests} missed: {found['missed_between']} between tokens, "
        f"{found['missed_first']} first ones; ttft p50 {first['p50'] / 1e3:.2f} s, p90 {first['p90'] / 1e3:.2f} s; "
        f"p95 of gaps p50 {between['p50']:.0f} ms, p90 {between['p90']:.0f} ms"
    )


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=sorted(LOADS))
    parser.add_argument("rate", type=float, help="requests per second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[ARRIVALS_SEED], help="one trial of each server for each"
    )
    parser.add_argument("--servers", nargs="+", help=f"of {', '.join(SERVERS)}, and variants; default: all")
    parser.add_argument(
        "--variant", nargs=2, action="append", default=[], metavar=("NAME", "OPTIONS"), help="of `tandem serve`, too"
    )
    parser.add_argument(
        "--objectives",
        type=Path,
        metavar="FILE",
        default=RESULTS / f"goodput-{cpu_tier()}.json",
        help="what bench.goodput wrote; default: the record of this tier",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    end_in_order()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES[_SHAPE], Path(folder))
        rows = uvloop.run(measure(args, Path(folder)))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
