"""Goodput against vLLM's server and among Tandem's own forms, on the same cores: `python -m bench.goodput`.

Three loads (`bench.goodput_loads`) arrive as Poisson processes. First each server gets some requests of each load one
at a time: the objectives are 8 times the best server's median time to first token, and 3 times the best server's 95th
percentile of a request's gaps between messages. Goodput is the highest rate at which at least 90 % of the requests meet
both, by a bounded search (`bench.goodput_search`). A trial lasts a minute at least (without `--quick`, three), and one
that is won or lost closely goes on as long again: of 40 requests chance decides. All of this waits while the machine
is much slower than usual (`bench.pace`), and is done again if it is so afterwards. All servers are up and take turns,
part by part of their trials, so that all meet the same minutes; vLLM's processes are stopped while they have no turn.
Client and servers share the cores; the client's share of one is recorded.

Then, with the same servers: 16 × (256 + 64) tokens at once, and a burst of long prompts beside streams that decode
(`bench.interference`).

The whole takes hours on two cores. `--quick` has fewer requests, a coarser grid of rates and trials that end as soon
as they are clearly lost; `--rates-of FILE` begins each search near what an earlier run found, which saves trials.
`--json FILE` keeps the results after each load, and `--resume FILE` goes on from there.
A part is chosen by `--servers` and `--loads`; where the best server is left out, `--objectives FILE` takes the
objectives of an earlier run. `--once` tells two forms apart at one rate, for changes too small for the searches: what
misses is in the lines of the trials; a few requests more or fewer are noise. Both files are what `--json FILE` or
`--record` wrote. `--record` writes `bench/results/goodput-<tier>.json` and draws `docs/images/goodput-<tier>.svg`, by
the tier of our kernels here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import uvloop

from bench import interference
from bench.goodput_loads import LOADS, Arrival, Load, stretches
from bench.goodput_page import bars, section
from bench.goodput_search import FULL, QUICK, Effort, Objectives, RateSearch, misses_allowed, num_stretches, on_grid
from bench.goodput_trial import Trial, Unloaded, measure_unloaded, objectives_of, run_trial
from bench.interference import burst_shape
from bench.pace import Pace
from bench.peers.bars import interference_documents, served_documents
from bench.peers.job import peer_dtype
from bench.peers.process import end_in_order
from bench.peers.served import (
    AUTO,
    AUTO_OPTIONS,
    COLOCATED,
    TANDEM_SERVERS,
    VLLM_SERVER,
    ServedShape,
    Turn,
    open_servers,
    warm_up,
)
from bench.peers.served import measure as measure_served
from bench.peers.streams import StreamClient
from bench.record import write_record
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.machine import cpu_tier
from shell.cores import usable_cores

SERVERS: Mapping[str, Sequence[str]] = {**TANDEM_SERVERS, AUTO: AUTO_OPTIONS}
"""Of Tandem: options of `tandem serve` by name."""
TOGETHER, BURST = "served", "interference"
PARTS = (*LOADS, TOGETHER, BURST)
ARRIVALS_SEED = 13
"""Of times and lengths, unless another one is asked for."""
_SETTLE_S = 0.3

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run is to do."""

    shape: str
    cores: tuple[int, ...]
    servers: Mapping[str, Sequence[str]]
    """Of Tandem."""
    vllm_python: Path | None
    parts: tuple[str, ...]
    effort: Effort
    objectives: Mapping[str, Objectives]
    """Those that are given, by load; the others are measured."""
    first_per_s: float
    """Rate of each search's first trial, unless `first_rates` has one; then the nearest of the grid."""
    first_rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By load and server."""
    arrivals_seed: int = ARRIVALS_SEED
    found: Mapping[str, Document] = field(default_factory=dict)
    """Results by load that an earlier run has kept."""

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return PEER_SHAPES[self.shape].sizes["vocab_size"]

    @property
    def loads(self) -> tuple[Load, ...]:
        """Those among the parts."""
        return tuple(LOADS[part] for part in self.parts if part in LOADS)

    def settings(self) -> Document:
        """For the record."""
        return {
            "shape": self.shape,
            "tier": cpu_tier(),
            "vllm_dtype": peer_dtype(torch.backends.cpu.get_cpu_capability()),
            "threads": len(self.cores),
            "servers": {name: list(options) for name, options in self.servers.items()},
            "effort": asdict(self.effort),
            "arrivals_seed": self.arrivals_seed,
            "loads": {load.name: asdict(load) for load in self.loads},
            "served": asdict(ServedShape()),
            "burst": asdict(burst_shape(self.shape)),
        }


class Comparison:
    """One run over servers that are up and warm."""

    def __init__(self, plan: Plan, turns: Mapping[str, Turn], keep: Callable[[Document], None], pace: Pace) -> None:
        self._plan = plan
        self._turns = turns
        self._keep = keep
        """Is told the results so far after each load."""
        self._seeds = count(1)
        self._pace = pace
        self._machine = asyncio.Lock()
        """Held by the server whose turn it is; the next one is who has waited longest."""

    async def run(self) -> Document:
        """All parts; the record's results."""
        plan = self._plan
        results: Document = {"settings": plan.settings(), "loads": dict(plan.found), TOGETHER: {}, BURST: {}}
        for load in plan.loads:
            if load.name not in plan.found:
                results["loads"][load.name] = await self._load(load)
                self._keep(results)
        if TOGETHER in plan.parts:
            _say("all at once")
            served = await measure_served(self._turns, ServedShape(), plan.vocab_size, plan.effort.rounds)
            results[TOGETHER] = served_documents(served)
        if BURST in plan.parts:
            _say("long prompts beside streams")
            rivals = {name: turn for name, turn in self._turns.items() if name != COLOCATED}
            found = await interference.measure(rivals, burst_shape(plan.shape), plan.vocab_size, plan.effort.rounds)
            results[BURST] = interference_documents(found)
        return {**results, "bars": [bar.document() for bar in bars(results)]}

    async def _load(self, load: Load) -> Document:
        """Objectives, then all searches in turn."""
        unloaded = {} if load.name in self._plan.objectives else await self._unloaded(load)
        objectives = self._plan.objectives.get(load.name) or objectives_of(list(unloaded.values()))
        _say(
            f"{load.name}: objectives: first token {objectives.ttft_s * 1e3:.0f} ms, "
            f"between tokens {objectives.itl_s * 1e3:.1f} ms"
        )
        effort, first_rates = self._plan.effort, self._plan.first_rates.get(load.name, {})
        searches = {
            name: RateSearch(
                on_grid(first_rates[name], effort.ratio) if name in first_rates else self._plan.first_per_s,
                effort.ratio,
                effort.first_stride,
                effort.trials,
                effort.requests / effort.longest_s,
            )
            for name in self._turns
        }
        trials: dict[str, list[Trial]] = {name: [] for name in searches}
        while rates := {name: each.next_per_s for name, each in searches.items() if each.next_per_s is not None}:
            async with asyncio.TaskGroup() as tasks:
                running = {
                    name: tasks.create_task(self._trial(name, load, rate_per_s, objectives))
                    for name, rate_per_s in rates.items()
                }
            for name, task in running.items():
                trials[name].append(task.result())
                searches[name].tell(passed=task.result().passed)
        return {
            "objectives": asdict(objectives),
            "unloaded": {name: each.document() for name, each in unloaded.items()},
            "servers": {
                name: {
                    "goodput_per_s": search.passed_per_s,
                    "failed_per_s": search.failed_per_s,
                    "trials": [trial.document() for trial in trials[name]],
                }
                for name, search in searches.items()
            },
        }

    async def _unloaded(self, load: Load) -> dict[str, Unloaded]:
        """By server."""
        found = {}
        for name in self._turns:
            once = partial(self._unloaded_once, name, load)
            unloaded, pace, _ = await self._pace.hold(partial(self._turn, name), once)
            found[name] = replace(unloaded, pace=pace)
            _say(f"{load.name}: {name} unloaded: {_rounded(found[name].document())}")
        return found

    async def _unloaded_once(self, name: str, load: Load) -> Unloaded:
        into, effort = Unloaded(), self._plan.effort
        async with self._turn(name) as client:
            await measure_unloaded(client, load, effort.unloaded, self._plan.vocab_size, next(self._seeds), into)
        return into

    async def _trial(self, name: str, load: Load, rate_per_s: float, objectives: Objectives) -> Trial:
        """In several turns; between them other servers have theirs, so that all meet the same minutes."""
        effort, seed = self._plan.effort, self._plan.arrivals_seed
        planned = num_stretches(rate_per_s, effort.requests, effort.least_s)
        size, done, goes_on = math.ceil(planned / effort.turns), 0, effort.close > 0
        trial: Trial | None = None
        while done < planned:
            most = misses_allowed(planned * effort.requests, effort.close) if effort.leaves_early else math.inf
            left = most - (0 if trial is None else trial.missed)
            requests = stretches(load, rate_per_s, effort.requests, min(size, planned - done), seed + done)
            part = await self._part(name, requests, rate_per_s, objectives, left)
            trial = part if trial is None else trial.and_then(part)
            done += size
            if trial.missed > most:
                break
            if done >= planned and goes_on and trial.is_close(effort.close):
                planned, done, goes_on = 2 * planned, planned, False
        assert trial is not None
        _say(f"{load.name}: {name}: {_rounded(trial.document())}")
        return trial

    async def _part(
        self, name: str, requests: Sequence[Arrival], rate_per_s: float, objectives: Objectives, misses_left: float
    ) -> Trial:
        """Of a trial, in one turn."""

        async def once() -> Trial:
            seed, vocab_size = next(self._seeds), self._plan.vocab_size
            async with self._turn(name) as client:
                return await run_trial(client, requests, rate_per_s, objectives, vocab_size, seed, misses_left)

        async with self._machine:
            part, pace, redone = await self._pace.hold(partial(self._turn, name), once)
        return replace(part, pace=pace, redone=redone)

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[StreamClient]:
        """The server's turn, from when it answers a short request: whatever was left early has ended by then."""
        async with self._turns[name]() as client:
            await asyncio.sleep(_SETTLE_S)
            await client.generate((5, 6, 7, 8), 2)
            yield client


async def measure(plan: Plan, model: Path, keep: Callable[[Document], None] = lambda _: None) -> Document:
    """Starts the servers, warms them up, measures, ends them; `keep` is told the results so far."""
    _say("servers start")
    async with open_servers(model, plan.servers, plan.cores, plan.vllm_python) as turns:
        for turn in turns.values():
            async with turn() as client:
                await warm_up(client, plan.vocab_size)
        return await Comparison(plan, turns, keep, Pace()).run()


def read_objectives(path: Path | None) -> dict[str, Objectives]:
    """By load, from what `--json` or `--record` wrote."""
    return {name: Objectives(**each["objectives"]) for name, each in _loads_of(path).items()}


def read_rates(path: Path | None) -> dict[str, dict[str, float]]:
    """By load and server: what it passed in an earlier run, else the lowest rate that it failed, if it was tried."""
    return {
        name: {
            server: rate_per_s
            for server, found in each["servers"].items()
            if (rate_per_s := found["goodput_per_s"] or found["failed_per_s"]) is not None
        }
        for name, each in _loads_of(path).items()
    }


def _loads_of(path: Path | None) -> Document:
    """Of an earlier run; none without a path."""
    if path is None:
        return {}
    document = json.loads(path.read_text())
    loads: Document = document.get("results", document)["loads"]
    return loads


def read_found(path: Path | None, plan: Plan) -> dict[str, Document]:
    """The loads that `--json` has kept of an earlier run of the same plan; the effort may differ. Exits otherwise."""
    if path is None:
        return {}
    kept, wanted = json.loads(path.read_text())["settings"], json.loads(json.dumps(plan.settings()))
    differ = [name for name, value in wanted.items() if name != "effort" and kept[name] != value]
    if differ:
        sys.exit(f"{path} is of a run that differs in: {', '.join(differ)}")
    return _loads_of(path)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _rounded(document: Document) -> Document:
    return {
        name: _rounded(value) if isinstance(value, dict) else round(value, 3) if isinstance(value, float) else value
        for name, value in document.items()
    }


def _plan(args: argparse.Namespace) -> Plan:
    """Binds this process, and so all that it starts, to the cores that are compared on."""
    cores = usable_cores()[: args.threads]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))  # of `bench.pace`
    effort = QUICK if args.quick else FULL
    if args.once:
        effort = replace(effort, trials=1, leaves_early=False, close=0.0)
    known = {**SERVERS, **{name: shlex.split(options) for name, options in args.variant}}
    chosen = args.servers or [*known, *([VLLM_SERVER] if args.vllm_python else [])]
    return Plan(
        shape=args.shape,
        cores=cores,
        servers={name: known[name] for name in chosen if name != VLLM_SERVER},
        vllm_python=args.vllm_python if VLLM_SERVER in chosen else None,
        parts=tuple(args.loads),
        effort=effort,
        objectives=read_objectives(args.objectives),
        first_per_s=args.first_rate,
        first_rates=read_rates(args.rates_of),
        arrivals_seed=args.arrivals_seed,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="python of vLLM's environment; see `bench.peers`")
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--threads", type=int, default=2, help="cores, and threads of vLLM")
    parser.add_argument("--servers", nargs="+", help=f"of {', '.join(SERVERS)}, {VLLM_SERVER}, variants; default: all")
    parser.add_argument(
        "--variant", nargs=2, action="append", default=[], metavar=("NAME", "OPTIONS"), help="of `tandem serve`, too"
    )
    parser.add_argument("--loads", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: all")
    parser.add_argument("--objectives", type=Path, metavar="FILE", help="take them from an earlier run")
    parser.add_argument("--first-rate", type=float, default=1.0, help="requests per second of the first trial")
    parser.add_argument("--rates-of", type=Path, metavar="FILE", help="begin each search near what that run found")
    parser.add_argument("--once", action="store_true", help="one trial of each, at its first rate and to its end")
    parser.add_argument("--arrivals-seed", type=int, default=ARRIVALS_SEED, help="of times and lengths")
    parser.add_argument("--quick", action="store_true", help="fewer requests and rates")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on after the loads that `--json FILE` has kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each load")
    parser.add_argument("--record", action="store_true", help="of a whole run: write the record, plot and page")
    args = parser.parse_args()
    if args.record and (args.servers or args.once or tuple(args.loads) != PARTS):
        parser.error(
            "--record wants whole searches of all servers and loads; without --vllm-python none is held against vLLM"
        )
    return args


def main() -> int:
    """Prints the section."""
    args = _arguments()
    end_in_order()
    plan = _plan(args)
    plan = replace(plan, found=read_found(args.resume, plan))

    def keep(results: Document) -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=2))

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES[plan.shape], Path(folder))
        results = uvloop.run(measure(plan, Path(folder), keep))
    print("\n".join(section(results)))
    keep(results)
    if args.record:
        write_record(f"goodput-{cpu_tier()}", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
