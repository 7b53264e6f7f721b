"""What the simulator predicts against what was measured on this machine: the part `--validate` of `bench.simulate`.

Measures as `bench.goodput` does, or reads what that measured; then replays the very same arrivals, at the same rates,
under the same objectives. Costs come from steps of the engine and from two served workers beside each other
(`bench.calibrate`), and from requests one at a time: what server and client add to a step. No figure of the loads goes
into them.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import uvloop

from bench import goodput
from bench.calibrate import calibrate
from bench.goodput_loads import LOADS, Arrival, Load, arrivals, stretches
from bench.goodput_search import QUICK, RateSearch, num_stretches
from bench.goodput_trial import UNLOADED_LENGTHS_SEED
from bench.peers.served import AUTO, COLOCATED, DISAGGREGATED, WARM_UP_OUTPUT, WARM_UP_PROMPTS
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.markdown import table
from shell.cores import usable_cores
from simulator.cluster import Fleet, Policy, Setup, simulate
from simulator.costs import CostModel, served
from simulator.outcomes import Result, Slo
from simulator.sizing import passes
from simulator.traces import Ask, Piece

SHAPE = "135m"
_APART_S = 60.0
_UNLOADED = 3
"""Requests alone, of each load on each server."""
_P95 = NormalDist().inv_cdf(0.95)
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One server under one load."""

    load: str
    server: str
    measured_per_s: float
    """Goodput."""
    predicted_per_s: float
    what: str
    """At which rate, or by what search."""
    ttft_s: tuple[float, float] | None = None
    """Median first token, measured and predicted."""

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted_per_s / self.measured_per_s - 1 if self.measured_per_s else float("nan")


@dataclass(frozen=True, slots=True)
class Alone:
    """Requests one at a time."""

    ttft_s: float
    gap_s: float
    """Median."""
    gap_p95_s: float
    """Of each request's own gaps, the median of requests."""

    @classmethod
    def of(cls, results: Document, load: str, server: str) -> Alone:
        """As measured. Records that lack the gaps' median have that of the requests alone in the part "at once"."""
        unloaded = results["loads"][load]["unloaded"][server]
        gap_ms = unloaded.get("gap_ms") or results[goodput.TOGETHER][server]["alone_gap_ms_p50"]
        return cls(unloaded["ttft_ms"] / 1e3, gap_ms / 1e3, unloaded["itl_ms"] / 1e3)


def measure(
    loads: Sequence[str],
    servers: Sequence[str],
    rate_per_s: float,
    requests: int,
    rates: Mapping[str, Mapping[str, float]],
    seed: int | None,
) -> Document:
    """One trial of each load on each server, as a document of `bench.goodput`.

    `rates`: by load and server, instead of `rate_per_s`. `seed`: of the arrivals; None = those of `bench.goodput`.
    """
    cores = usable_cores()[:2]
    effort = replace(QUICK, requests=requests, unloaded=_UNLOADED, trials=1, least_s=0.0, close=0.0, leaves_early=False)
    chosen = {name: goodput.SERVERS[name] for name in servers}
    arrivals_seed = goodput.ARRIVALS_SEED if seed is None else seed
    plan = goodput.Plan(SHAPE, cores, chosen, None, tuple(loads), effort, {}, rate_per_s, rates, arrivals_seed)
    with _checkpoint() as model:
        return uvloop.run(goodput.measure(plan, model))


def carried(record: Document) -> dict[str, dict[str, float]]:
    """Highest rates at which 90 % attained in a record of `bench.goodput`, by load and server."""
    return {
        load: {server: found["goodput_per_s"] for server, found in each["servers"].items() if found["goodput_per_s"]}
        for load, each in record["loads"].items()
    }


def fleets(cores: int) -> Mapping[str, tuple[Fleet, int]]:
    """By name of the server: what it is made of, and the threads of each worker on `cores` cores."""
    return {
        COLOCATED: (Fleet(Policy.COLOCATED, 1), cores),
        DISAGGREGATED: (Fleet(Policy.STATIC, 1, 1), max(1, cores // 2)),
        AUTO: (Fleet(Policy.AUTO, 2 if cores > 1 else 1), max(1, cores // 2)),
    }


def costs_by_threads(threads: set[int]) -> list[CostModel]:
    """Measured here and now."""
    with _checkpoint() as model:
        return [calibrate(model, each)[0] for each in sorted(threads)]


def compare(results: Document, measured_costs: Sequence[CostModel]) -> list[Row]:
    """Predicted and measured, for each trial whose requests all ended, and for each search of more than one trial.

    `measured_costs`: for each number of threads that `fleets` names.
    """
    costs = {each.threads: each for each in measured_costs}
    rows: list[Row] = []
    kinds = fleets(results["settings"]["threads"])
    for name, each in results["loads"].items():
        load, effort = LOADS[name], results["settings"]["effort"]
        slo = Slo(**each["objectives"])
        for server, found in each["servers"].items():
            if server not in kinds:
                continue
            fleet, threads = kinds[server]
            alone = Alone.of(results, name, server)
            setup = Setup(fleet, as_served(costs[threads], fleet, load, alone, effort["unloaded"]))
            seed = results["settings"].get("arrivals_seed", goodput.ARRIVALS_SEED)
            replay = _Replay(setup, load, effort["unloaded"], seed)
            for trial in found["trials"]:
                if trial["ended"] < trial["requests"]:
                    continue  # it was left early: what it attained is not that of a whole trial
                result = replay.trial(effort, trial["rate_per_s"], trial["requests"])
                rate = trial["rate_per_s"]
                predicted = rate * result.attainment(slo)
                ttft_s = (
                    trial["ttft_ms"]["p50"] / 1e3,
                    statistics.median(each.ttft_s or 0.0 for each in result.outcomes),
                )
                rows.append(Row(name, server, rate * trial["attainment"], predicted, f"at {rate:.2f}/s", ttft_s))
            if len(found["trials"]) > 1:
                predicted = replay.search(slo, effort, found["trials"][0]["rate_per_s"])
                rows.append(Row(name, server, found["goodput_per_s"] or 0.0, predicted, "highest with 90 %"))
    return rows


def as_served(costs: CostModel, fleet: Fleet, load: Load, alone: Alone, count: int) -> CostModel:
    """With what serving adds, so that requests one at a time take what they were measured to take.

    To every step the same time is added: control loop and messages cost it once per step, however large that is. What
    is then missing to the first token is in the prompts' tokens. Steps differ from each other as the gaps did.
    """
    for _ in range(4):  # the two touch each other a little
        outcomes = simulate(Setup(fleet, costs), _alone(load, count)).outcomes
        ttft_s = statistics.median(each.ttft_s or 0.0 for each in outcomes)
        gap_s = statistics.median(each.itl_s or 0.0 for each in outcomes)
        added_s = max(alone.gap_s - gap_s, -0.9 * costs.step.base)
        factor = max(0.1, 1.0 + (alone.ttft_s - ttft_s - added_s) / ttft_s)
        costs = replace(costs, step=served(costs.step, added_s, factor))
    return replace(costs, jitter=max(0.0, math.log(alone.gap_p95_s / alone.gap_s)) / _P95)


def section(rows: Sequence[Row]) -> str:
    """A table."""
    return table(
        ["load", "server", "", "measured /s", "predicted /s", "error", "first token p50, s: measured, predicted"],
        [
            [
                row.load,
                row.server,
                row.what,
                f"{row.measured_per_s:.2f}",
                f"{row.predicted_per_s:.2f}",
                f"{100 * row.error:+.0f} %" if row.measured_per_s else "–",
                "" if row.ttft_s is None else f"{row.ttft_s[0]:.2f}, {row.ttft_s[1]:.2f}",
            ]
            for row in rows
        ],
    )


@dataclass(frozen=True, slots=True)
class _Replay:
    """One measured server under one load, simulated."""

    setup: Setup
    load: Load
    unloaded: int
    """Requests alone that came before the trials."""
    seed: int
    """Of the arrivals."""

    def search(self, slo: Slo, effort: Document, first_per_s: float) -> float:
        """The same search as `bench.goodput`'s, from the same rate on: so it passes and fails at rates of that grid."""
        least_per_s = effort["requests"] / effort["longest_s"] if "longest_s" in effort else 0.0
        search = RateSearch(first_per_s, effort["ratio"], effort["first_stride"], effort["trials"], least_per_s)
        while (rate := search.next_per_s) is not None:
            requests = effort["requests"] * num_stretches(rate, effort["requests"], effort.get("least_s", 0.0))
            search.tell(passed=passes(self.trial(effort, rate, requests), slo))
        return search.passed_per_s or 0.0

    def trial(self, effort: Document, rate_per_s: float, requests: int) -> Result:
        """After what the measured server had done before: its workers have learned what their steps take.

        In as many turns, apart from each other.
        """
        before = [*_warm_up(), *_alone(self.load, self.unloaded)]
        after_s, each = (len(before) + 1) * _APART_S, effort["requests"]
        planned = num_stretches(rate_per_s, each, effort.get("least_s", 0.0))
        of_turn = each * math.ceil(planned / effort["turns"]) if "turns" in effort else requests
        arriving = [
            replace(arrival, at_s=arrival.at_s + number // of_turn * _APART_S)
            for number, arrival in enumerate(stretches(self.load, rate_per_s, each, requests // each, self.seed))
        ]
        asks = _asks(arriving, after_s)
        result = simulate(self.setup, [*before, *asks])
        return replace(result, outcomes=result.outcomes[len(before) :])


def _warm_up() -> list[Ask]:
    return [Ask(0.0, (Piece(number, tokens),), WARM_UP_OUTPUT) for number, tokens in enumerate(WARM_UP_PROMPTS, 10**6)]


def _alone(load: Load, count: int) -> list[Ask]:
    requests = arrivals(load, 1.0, count, UNLOADED_LENGTHS_SEED)
    return _asks([replace(each, at_s=number * _APART_S) for number, each in enumerate(requests, 1)], name=2 * 10**6)


def _asks(requests: Sequence[Arrival], after_s: float = 0.0, name: int = 1) -> list[Ask]:
    return [
        Ask(after_s + each.at_s, (Piece(number, each.prompt_tokens),), each.output_tokens)
        for number, each in enumerate(requests, name)
    ]


@contextmanager
def _checkpoint() -> Iterator[Path]:
    """The peers' model, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(PEER_SHAPES[SHAPE], Path(folder))
        yield Path(folder)
