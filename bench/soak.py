"""Callers check every answer while processes die, freeze, stop, drain, and connections break: `python -m bench.soak`.

Rounds on the demo model, at 1 + 1, 2 + 2 and 4 elastic workers of `tandem serve`, over each transport that works on
this machine. Twelve callers send requests over every sampling parameter, greedy and sampled; every other one shares:
prompts that begin alike, salts, several choices, beams, constraints. They go through proxies that reset connections;
some callers cancel, read slowly, have a tiny deadline or none (`bench.soak_calls`).
Meanwhile one fault comes after the other (`bench.soak_faults`). Then they end, and the cluster must come to rest.

A violation, each told with its round's seed; exit code 1:

    wrong token    an answer that is not the one of the quiet run; of a call that failed or was left: not its beginning
    hang           a call that has not ended 1 s after its deadline (60 s without one); a router that holds more
                   requests than were under way in the last second
    error          one that no death and no freeze explains, such as INTERNAL
    not whole      a worker that is not back and serving 60 s after the last fault
    not healed     a request that fails after that, or an answer that is wrong
    not ended      `tandem serve` that does not end, or not with code 0, after SIGTERM
    leak           a block that somebody holds; in a process that survived the round: more descriptors, threads or
                   memory than it had before the faults, beyond the slack below

The share served is of the calls that wanted an answer and had time for it. A round's faults, requests and callers are
drawn from the seed and the round's number; what they meet depends on timing too. `--seed S --only-round N` draws the
same round again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from bench import reliability_page
from bench.cluster import Cluster, serve
from bench.random_requests import MAX_PRIORITY
from bench.record import write_record
from bench.soak_calls import Kind, Manner, draw_requests, learn
from bench.soak_round import Account, Round
from engine.loading import resolve_device
from kvtransfer.transports import usable
from tandem.client import AsyncClient
from tandem.clock import MonotonicClock

NUM_KINDS = 60
READY_TIMEOUT_S = 120.0
_SMALL = ("--max-seqs", "8", "--chunk-tokens", "128", "--kv-blocks", "200", "--max-priority", str(MAX_PRIORITY))
"""So that sequences wait in lines and are preempted."""
_OVERHEAD_S = 15.0
"""About what a round takes besides its storm."""
_LONGEST_STORM_S = 120.0


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster of `tandem serve`."""

    workers: int
    """Of each role; of elastic ones there are twice as many."""
    transport: str
    elastic: bool = False

    @property
    def title(self) -> str:
        """For people."""
        return (
            f"{2 * self.workers} elastic {self.transport}"
            if self.elastic
            else f"{self.workers}+{self.workers} {self.transport}"
        )

    @property
    def later_links(self) -> int:
        """Links that a worker may still open once all serve: elastic ones open them, both ways, as they hand over."""
        return 2 * (2 * self.workers - 1) if self.elastic else 0

    @property
    def options(self) -> tuple[str, ...]:
        """The command line."""
        number = str(self.workers)
        fleet = ("--prefill", number, "--decode", number)
        if self.elastic:
            fleet = ("--roles", "auto", "--workers", str(2 * self.workers))
        return (*fleet, "--transport", self.transport, *_SMALL)


def setups() -> list[Setup]:
    """Both sizes over every transport that works here; over every second one the larger fleet is elastic."""
    transports = usable(resolve_device("auto"))
    return [
        Setup(workers, transport, elastic=workers == 2 and at % 2 == 1)
        for at, transport in enumerate(transports)
        for workers in (1, 2)
    ]


async def _learn(target: str, seed: int) -> list[Kind]:
    async with AsyncClient(target) as client:
        await client.wait_ready(READY_TIMEOUT_S)
        return await learn(client, draw_requests(NUM_KINDS, seed))


def run_round(number: int, seed: int, storm_s: float, kinds: Sequence[Kind]) -> Account:
    """One round, on a cluster of its own; setups take turns."""
    chosen = setups()[number % len(setups())]
    title = f"round {number} of seed {seed}, {chosen.title}"
    print(title, flush=True)
    with serve("demo", *chosen.options) as cluster, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rng = random.Random(f"{seed}/{number}")
        account = runner.run(Round(title, cluster, chosen.workers, kinds, rng, chosen.later_links).run(storm_s))
        return replace(account, violations=(*account.violations, *_stop(cluster)))


def _stop(cluster: Cluster) -> list[str]:
    """Ends it; what is wrong with how it leaves."""
    try:
        code = cluster.stop()
    except subprocess.TimeoutExpired as error:
        return [f"hang: tandem serve has not ended {error.timeout:g} s after SIGTERM"]
    return [f"error: tandem serve left with code {code}"] if code else []


def soak(seed: int, minutes: float, only_round: int | None = None) -> list[Account]:
    """Rounds until the time is up; each setup has one at least."""
    with serve("demo", *setups()[0].options) as cluster:
        kinds = asyncio.run(_learn(cluster.target, seed))
    storm_s = min(_LONGEST_STORM_S, max(1.0, 60 * minutes / len(setups()) - _OVERHEAD_S))
    if only_round is not None:
        return [run_round(only_round, seed, storm_s, kinds)]
    clock = MonotonicClock()
    end_s = clock.now_s() + 60 * minutes
    accounts: list[Account] = []
    while len(accounts) < len(setups()) or clock.now_s() + storm_s < end_s:
        accounts.append(run_round(len(accounts), seed, storm_s, kinds))
    return accounts


def summary(seed: int, minutes: float, accounts: Sequence[Account]) -> dict[str, Any]:
    """What is recorded."""
    calls = {
        manner.value: dict(sum((Counter(each.calls[manner]) for each in accounts), Counter())) for manner in Manner
    }
    wanted = sum(each.wanted for each in accounts)
    served = sum(each.served for each in accounts)
    faults = dict(sum((Counter(each.faults) for each in accounts), Counter()))
    violations = [f"{each.title}: {what}" for each in accounts for what in each.violations]
    if not (faults and served):
        violations.append(f"this run shows nothing: {served} calls served, {len(faults)} kinds of faults")
    return {
        "seed": seed,
        "minutes": minutes,
        "rounds": [each.title for each in accounts],
        "storm_s": sum(each.seconds for each in accounts),
        "faults": faults,
        "calls": calls,
        "wanted": wanted,
        "served": served,
        "most_late_s": max(each.most_late_s for each in accounts),
        "violations": violations,
    }


def main() -> int:
    """Runs, prints, records; exit code 1 if anything was violated."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the storms last, about")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn; default: another one each time")
    parser.add_argument("--only-round", type=int, default=None, metavar="N", help="this round of the seed alone")
    parser.add_argument("--record", action="store_true", help="write bench/results/soak.json and the page")
    options = parser.parse_args()
    if options.record and options.only_round is not None:
        parser.error("--record is for a whole run: leave out --only-round")
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: python -m bench.soak --minutes {options.minutes:g} --seed {seed}", flush=True)
    accounts = soak(seed, options.minutes, options.only_round)
    results = summary(seed, options.minutes, accounts)
    print(reliability_page.soak_section(results))
    print(*results["violations"], sep="\n")
    if options.record:
        write_record("soak", results)
        reliability_page.main()
    return 1 if results["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
