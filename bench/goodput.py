"""Goodput in paired trials, on the same cores and in the same minutes: `python -m bench.goodput`.

Three loads (`bench.goodput_trial`) arrive as Poisson processes. A trial is one load at one rate with one seed of
arrivals, on every server in turn: each server meets the same requests at the same times, and a neighbour of the machine
disturbs all servers alike. Objectives are 8 times the best server's median time to first token, and 3 times the best
server's 95th percentile of a request's gaps, of requests one at a time. A server passes a rate if at least 90 % of the
requests of all its trials at that rate meet both. Rates are climbed from the first one in equal ratios: up with the
servers that pass, down with those that fail. Goodput is the highest rate that a server passes.

`--at RATE` (or `LOAD=RATE …`) climbs nothing: so two forms are told apart by their misses under equal arrivals.
`--base DIR` adds the servers of another installed checkout, with ` before` behind their names. `--objectives FILE`
takes the objectives of an earlier run. `--record` writes `bench/results/goodput-<tier>.json`; `bench.report` renders
it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from bench.goodput_trial import (
    LOADS,
    Load,
    Objectives,
    Trial,
    arrivals,
    measure_unloaded,
    objectives_of,
    passes,
    run_trial,
)
from bench.peers.process import end_in_order
from bench.peers.servers import (
    AUTO,
    AUTO_OPTIONS,
    TANDEM_SERVERS,
    VLLM_SERVER,
    Server,
    Turn,
    open_servers,
    warm_up,
)
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.machine import cpu_tier, write_record
from bench.support.markdown import table
from bench.support.pairs import student_t
from bench.support.streams import StreamClient
from shell.cores import usable_cores

SERVERS: Mapping[str, Sequence[str]] = {**TANDEM_SERVERS, AUTO: AUTO_OPTIONS}
"""Of Tandem: options of `tandem serve` by name."""
ARRIVALS_SEED = 13
"""Of the first trial at each rate; later ones follow."""
_SETTLE_S = 0.3

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly is measured."""

    requests: int
    """Of each trial."""
    arrivals: int
    """Trials at each rate, each with a seed of its own."""
    unloaded: int
    """Requests alone, of each load on each server."""
    ratio: float
    """Between neighbouring rates."""
    rates: int
    """At most, in each direction."""


FULL = Effort(requests=80, arrivals=6, unloaded=9, ratio=1.15, rates=8)
QUICK = Effort(requests=40, arrivals=2, unloaded=4, ratio=1.3, rates=5)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run is to do."""

    shape: str
    cores: tuple[int, ...]
    servers: Mapping[str, Server]
    """Of Tandem."""
    vllm_python: Path | None
    loads: tuple[str, ...]
    effort: Effort
    first_per_s: Mapping[str, float]
    """By load; where the climb begins."""
    climbs: bool = True
    objectives: Mapping[str, Objectives] = field(default_factory=dict)
    """Those that are given, by load; the others are measured."""
    arrivals_seed: int = ARRIVALS_SEED

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return PEER_SHAPES[self.shape].sizes["vocab_size"]

    def settings(self) -> Document:
        """For the record."""
        return {
            "shape": self.shape,
            "tier": cpu_tier(),
            "threads": len(self.cores),
            "servers": {name: list(each.options) for name, each in self.servers.items()},
            "effort": asdict(self.effort),
            "arrivals_seed": self.arrivals_seed,
            "loads": {name: asdict(LOADS[name]) for name in self.loads},
        }


class Comparison:
    """One run over servers that are up and warm."""

    def __init__(self, plan: Plan, turns: Mapping[str, Turn], keep: Callable[[Document], None]) -> None:
        """`keep` is called with the results so far after each load."""
        self._plan = plan
        self._turns = turns
        self._keep = keep
        self._prompt_seeds = count(1)
        self._rotation = count()

    async def run(self) -> Document:
        """All loads; the record's results."""
        results: Document = {"settings": self._plan.settings(), "loads": {}}
        for name in self._plan.loads:
            results["loads"][name] = await self._load(LOADS[name])
            self._keep(results)
        return results

    async def _load(self, load: Load) -> Document:
        unloaded = {}
        if load.name not in self._plan.objectives:
            for name in self._turns:
                async with self._turn(name) as client:
                    alone = (self._plan.effort.unloaded, self._plan.vocab_size, next(self._prompt_seeds))
                    unloaded[name] = await measure_unloaded(client, load, *alone)
        objectives = self._plan.objectives.get(load.name) or objectives_of(list(unloaded.values()))
        _say(f"{load.name}: first token {objectives.ttft_s * 1e3:.0f} ms, gaps {objectives.itl_s * 1e3:.1f} ms")
        trials = await climb(
            list(self._turns),
            self._plan.first_per_s[load.name],
            self._plan.effort,
            lambda names, rate_per_s: self._trials(load, names, rate_per_s, objectives),
            climbs=self._plan.climbs,
        )
        return {
            "objectives": asdict(objectives),
            "unloaded": {name: each.document() for name, each in unloaded.items()},
            "servers": {name: server_document(found) for name, found in trials.items()},
        }

    async def _trials(
        self, load: Load, names: Sequence[str], rate_per_s: float, objectives: Objectives
    ) -> dict[str, list[Trial]]:
        """One trial for each seed on each server; who begins changes."""
        effort, found = self._plan.effort, {name: list[Trial]() for name in names}
        for seed in range(self._plan.arrivals_seed, self._plan.arrivals_seed + effort.arrivals):
            requests = arrivals(load, rate_per_s, effort.requests, seed)
            first = next(self._rotation) % len(names)
            for name in (*names[first:], *names[:first]):
                async with self._turn(name) as client:
                    drawn = (self._plan.vocab_size, next(self._prompt_seeds))
                    trial = await run_trial(client, requests, rate_per_s, seed, objectives, *drawn)
                found[name].append(trial)
                _say(f"{load.name} {rate_per_s:.2f}/s, arrivals {seed}: {name} {trial.attained}/{effort.requests}")
        return found

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[StreamClient]:
        """The server's turn, from when it answers a short request."""
        async with self._turns[name]() as client:
            await asyncio.sleep(_SETTLE_S)
            await client.generate((5, 6, 7, 8), 2)
            yield client


async def climb(
    servers: Sequence[str], first_per_s: float, effort: Effort, measure: Any, *, climbs: bool = True
) -> dict[str, list[Trial]]:
    """All trials by server. `measure(servers, rate)` is awaited; it returns the trials of each of these servers.

    From `first_per_s` upwards with the servers that passed, then downwards with those that have passed nothing.
    """
    trials: dict[str, list[Trial]] = {name: [] for name in servers}

    async def passing(names: Sequence[str], rate_per_s: float) -> list[str]:
        found = await measure(names, rate_per_s)
        for name in names:
            trials[name] += found[name]
        return [name for name in names if passes(found[name])]

    going = passed = await passing(servers, first_per_s)
    failing = [name for name in servers if name not in passed]
    for step in range(1, effort.rates if climbs else 0):
        if going:
            going = await passing(going, first_per_s * effort.ratio**step)
        if failing:
            passed = await passing(failing, first_per_s / effort.ratio**step)
            failing = [name for name in failing if name not in passed]
    return trials


def server_document(trials: Sequence[Trial]) -> Document:
    """Goodput, the lowest rate that failed, and all trials."""
    by_rate: dict[float, list[Trial]] = {}
    for trial in trials:
        by_rate.setdefault(trial.rate_per_s, []).append(trial)
    good = [rate for rate, each in by_rate.items() if passes(each)]
    return {
        "goodput_per_s": max(good, default=None),
        "failed_per_s": min(by_rate.keys() - set(good), default=None),
        "trials": [trial.document() for trial in trials],
    }


def pairs_table(results: Document) -> str:
    """Requests in time of each server at each rate, and by how much it differs from the first, per trial.

    The difference is the mean over arrivals that both met, with half of its 95 % interval.
    """
    rows = []
    for load, each in results["loads"].items():
        first, *_ = each["servers"]
        known = {(trial["rate_per_s"], trial["seed"]): trial for trial in each["servers"][first]["trials"]}
        for server, found in each["servers"].items():
            for rate in sorted({trial["rate_per_s"] for trial in found["trials"]}):
                mine = [trial for trial in found["trials"] if trial["rate_per_s"] == rate]
                differences = [
                    in_time(trial) - in_time(known[rate, trial["seed"]])
                    for trial in mine
                    if (rate, trial["seed"]) in known
                ]
                asked = sum(trial["requests"] for trial in mine)
                timely = f"{sum(map(in_time, mine))} of {asked}"
                missed = ", ".join(str(sum(t[which] for t in mine)) for which in ("missed_first", "missed_between"))
                rows.append((load, f"{rate:.2f}", server, timely, missed, _spread(differences)))
    return table(("load", "per second", "server", "in time", "missed: first token, gaps", "than the first"), rows)


def in_time(trial: Document) -> int:
    """Requests of a recorded trial that met both objectives."""
    attained: float = trial["attainment"] * trial["ended"]
    return round(attained)


def _spread(differences: Sequence[int]) -> str:
    if len(differences) < 2:
        return "–"
    half = student_t(len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.fmean(differences):+.1f} ± {half:.1f}"


async def measure(plan: Plan, model: Path, keep: Callable[[Document], None] = lambda _: None) -> Document:
    """Starts the servers, warms them up, measures, ends them; `keep` is called with the results so far."""
    _say("servers start")
    async with open_servers(model, plan.servers, plan.cores, plan.vllm_python) as turns:
        for turn in turns.values():
            async with turn() as client:
                await warm_up(client, plan.vocab_size)
        return await Comparison(plan, turns, keep).run()


def loads_of(path: Path | None) -> Document:
    """Of what `--json` or `--record` wrote; none without a path."""
    document = {"loads": {}} if path is None else json.loads(path.read_text())
    loads: Document = document.get("results", document)["loads"]
    return loads


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _plan(args: argparse.Namespace) -> Plan:
    """Binds this process, and so all that it starts, to the cores that are compared on."""
    cores = usable_cores()[: args.threads]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    known = {**SERVERS, **{name: shlex.split(options) for name, options in args.variant}}
    chosen = {name: Server(known[name]) for name in args.servers or known if name in known}
    if args.base is not None:
        chosen |= {f"{name} before": Server(each.options, args.base.resolve()) for name, each in chosen.items()}
    rates = dict.fromkeys(LOADS, 1.0)
    for each in args.at or args.first_rate:
        name, _, rate = each.rpartition("=")
        rates |= {name: float(rate)} if name else dict.fromkeys(LOADS, float(rate))
    objectives = {name: Objectives(**each["objectives"]) for name, each in loads_of(args.objectives).items()}
    with_vllm = args.vllm_python if args.servers is None or VLLM_SERVER in args.servers else None
    effort = QUICK if args.quick else FULL
    climbs = args.at is None
    return Plan(
        args.shape, cores, chosen, with_vllm, tuple(args.loads), effort, rates, climbs, objectives, args.arrivals_seed
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="python of vLLM's environment, as `make peers-venv` makes it")
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--threads", type=int, default=2, help="cores, and threads of vLLM")
    parser.add_argument("--servers", nargs="+", help=f"of {', '.join(SERVERS)}, {VLLM_SERVER}, variants; default: all")
    variant = {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "OPTIONS")}
    parser.add_argument("--variant", **variant, help="of `tandem serve`, too")  # type: ignore[arg-type]
    parser.add_argument("--base", type=Path, metavar="DIR", help="an installed checkout: its servers take turns, too")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--objectives", type=Path, metavar="FILE", help="take them from an earlier run")
    parser.add_argument("--at", nargs="+", metavar="[LOAD=]RATE", help="requests per second; climbs nothing")
    parser.add_argument("--first-rate", nargs="+", default=[], metavar="[LOAD=]RATE", help="where the climb begins [1]")
    parser.add_argument("--arrivals-seed", type=int, default=ARRIVALS_SEED, help="of times and lengths")
    parser.add_argument("--quick", action="store_true", help="fewer requests, arrivals and rates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each load")
    parser.add_argument("--record", action="store_true", help="of a whole run: write the record")
    args = parser.parse_args()
    if args.record and (args.servers or args.at or args.base or set(args.loads) != set(LOADS)):
        parser.error("--record wants climbs of all servers and loads")
    return args


def main() -> int:
    """Prints the table."""
    args = _arguments()
    end_in_order()
    plan = _plan(args)

    def keep(results: Document) -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=2))

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES[plan.shape], Path(folder))
        results = uvloop.run(measure(plan, Path(folder), keep))
    print(pairs_table(results))
    if args.record:
        write_record(f"goodput-{cpu_tier()}", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
