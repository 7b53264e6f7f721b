"""Callers check every answer while processes die, freeze, stop, drain, and connections break: `python -m bench.soak`.

Rounds on the demo model, at 1 + 1, 2 + 2 and 4 elastic workers of `tandem serve` (`--fleets`), over each transport
that works on this machine. Twelve callers send requests over every sampling parameter, greedy and sampled; every other
one shares: prompts that begin alike, salts, several choices, beams, constraints. They go through proxies that reset
connections; some callers cancel, read slowly, have a tiny deadline or none (`bench.soak.calls`).
Meanwhile one fault comes after the other (`bench.soak.faults`), and an operator replaces the weights, restarts the
workers one by one, and lets workers with another layout of KV join for a while (`bench.soak.changes`). Then all that
ends, and the cluster must come to rest.

A violation, each told with its round's seed; exit code 1:

    wrong          an answer that is no model's of the quiet runs, whole; of a call that failed or was left: not the
                   beginning of one. A model is a set of weights with a layout of KV
    mixed          such an answer, each choice of which begins as a model's does
    hang           a call that has not ended 1 s after its deadline (60 s without one); a router that holds more
                   requests than were under way in the last second
    error          one that no death and no freeze explains, such as INTERNAL
    not whole      a worker that is not back and serving 60 s after the last fault
    not healed     a request that fails after that, or an answer that is wrong
    not ended      `tandem serve` that does not end, or not with code 0, after SIGTERM
    leak           a block that somebody holds; in a process that survived the round: more descriptors, threads or
                   memory than it had before the faults, beyond the slack below; a process that outlives
                   `tandem serve`; a file in shared memory that no process has open

The share served is of the calls that wanted an answer and had time for it, and whose connection stayed. A call that is
refused by MODEL_CHANGED is sent again and counts then. A round's faults, requests and callers are
drawn from the seed and the round's number; what they meet depends on timing too. `--seed S --only-round N` draws the
same round again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from bench.soak.calls import Kind, Manner, draw_requests, learn, merged
from bench.soak.changes import GUEST, NEW_WEIGHTS
from bench.soak.model import WEIGHTS, SoakModel
from bench.soak.round import Account, Round
from bench.support.cluster import Cluster, serve
from bench.support.processes import children, started_s
from bench.support.random_requests import MAX_PRIORITY
from engine.loading import resolve_device
from kvtransfer.transports import usable
from shell.clock import MonotonicClock
from tandem.client import AsyncClient

NUM_KINDS = 60
READY_TIMEOUT_S = 120.0
_SMALL = ("--max-seqs", "8", "--chunk-tokens", "128", "--kv-blocks", "200")
"""So that sequences wait in lines and are preempted."""
_LAYOUTS = {"": (), ", int8": ("--kv-dtype", "int8")}
"""That change answers, by what a model's name ends with."""
FLEETS = ("1+1", "2+2", "auto")
_SHARED_MEMORY = Path("/dev/shm")
_OVERHEAD_S = 15.0
"""About what a round takes besides its storm."""
_LONGEST_STORM_S = 120.0
_SORTS = ("wrong", "mixed", "hang", "leak")
"""Of violations: told even if there is none."""
_FEWEST_KINDS = 3
"""Of faults: new weights, guests, and one that hits a process."""


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
    def fleet(self) -> str:
        """Returns the name that `FLEETS` has."""
        return "auto" if self.elastic else f"{self.workers}+{self.workers}"

    @property
    def worker_options(self) -> tuple[str, ...]:
        """Returns the options of each worker, guests included."""
        return ("--transport", self.transport, *_SMALL)

    @property
    def options(self) -> tuple[str, ...]:
        """The command line."""
        number = str(self.workers)
        static = ("--prefill", number, "--decode", number)
        fleet = ("--workers", str(2 * self.workers)) if self.elastic else static
        return (*fleet, *self.worker_options, "--max-priority", str(MAX_PRIORITY))


def setups(fleets: Sequence[str] = FLEETS) -> list[Setup]:
    """These fleets over every transport that works here."""
    every = [
        Setup(workers, transport, elastic)
        for transport in usable(resolve_device("auto"))
        for workers, elastic in ((1, False), (2, False), (2, True))
    ]
    return [each for each in every if each.fleet in fleets]


def learn_models(model: SoakModel, seed: int) -> list[Kind]:
    """Every request's answers of all weights and layouts."""
    learned = []
    for weights in WEIGHTS:
        model.put(weights)
        for layout, options in _LAYOUTS.items():
            with serve(str(model.folder), *setups()[0].options, *options) as cluster:
                learned.append(asyncio.run(_learn(cluster.target, seed, weights + layout)))
    kinds = merged(*learned)
    differing = sum(each.answers[WEIGHTS[0]] != each.answers[WEIGHTS[1]] for each in kinds)
    print(f"{len(kinds)} requests, {differing} of which the two sets of weights answer differently", flush=True)
    return kinds


async def _learn(target: str, seed: int, name: str) -> list[Kind]:
    async with AsyncClient(target) as client:
        await client.wait_ready(READY_TIMEOUT_S)
        return await learn(client, draw_requests(NUM_KINDS, seed), name)


def run_round(
    number: int, seed: int, storm_s: float, kinds: Sequence[Kind], model: SoakModel, chosen: Setup
) -> Account:
    """One round, on a cluster of its own."""
    title = f"round {number} of seed {seed}, {chosen.title}"
    print(title, flush=True)
    model.put(WEIGHTS[0])
    files = _orphaned_files()
    with (
        serve(str(model.folder), *chosen.options) as cluster,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        one = Round(
            title,
            cluster,
            chosen.workers,
            kinds,
            model,
            random.Random(f"{seed}/{number}"),
            guest_options=chosen.worker_options,
            later_links=chosen.later_links,
        )
        account = runner.run(one.run(storm_s))
        ended = _stop(cluster)
    ended += [f"leak: {name} is left in {_SHARED_MEMORY}" for name in sorted(_orphaned_files() - files)]
    return replace(account, violations=(*account.violations, *ended))


def _orphaned_files() -> set[str]:
    """Files in shared memory that no process maps or has open."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            held |= {line.split(maxsplit=5)[-1].strip() for line in (process / "maps").read_text().splitlines()}
            held |= {os.readlink(each) for each in (process / "fd").iterdir()}
    return {each.name for each in _SHARED_MEMORY.iterdir() if str(each) not in held}


def _stop(cluster: Cluster) -> list[str]:
    """Ends it; what is wrong with how it leaves, and what outlives it."""
    pid = cluster.process.pid
    members = children(pid)
    began = {name: started_s(pid) for name, pid in members.items()}
    try:
        code = cluster.stop()
    except subprocess.TimeoutExpired as error:
        return [f"hang: tandem serve has not ended {error.timeout:g} s after SIGTERM"]
    found = [f"error: tandem serve left with code {code}"] if code else []
    alive = [name for name, pid in members.items() if began[name] is not None and started_s(pid) == began[name]]
    return found + [f"leak: {name} (pid {members[name]}) outlives tandem serve" for name in alive]


def soak(seed: int, minutes: float, only_round: int | None = None, fleets: Sequence[str] = FLEETS) -> list[Account]:
    """Rounds until the time is up; setups take turns, and each has one at least."""
    chosen = setups(fleets)
    storm_s = min(_LONGEST_STORM_S, max(1.0, 60 * minutes / len(chosen) - _OVERHEAD_S))
    with SoakModel.laid() as model:
        kinds = learn_models(model, seed)

        def run(number: int) -> Account:
            return run_round(number, seed, storm_s, kinds, model, chosen[number % len(chosen)])

        if only_round is not None:
            return [run(only_round)]
        clock = MonotonicClock()
        end_s = clock.now_s() + 60 * minutes
        accounts: list[Account] = []
        while len(accounts) < len(chosen) or clock.now_s() + storm_s < end_s:
            accounts.append(run(len(accounts)))
        return accounts


def summary(seed: int, minutes: float, accounts: Sequence[Account]) -> dict[str, Any]:
    """What is recorded."""
    calls = {
        manner.value: dict(sum((Counter(each.calls[manner]) for each in accounts), Counter())) for manner in Manner
    }
    wanted = sum(each.wanted for each in accounts)
    stayed = sum(each.stayed for each in accounts)
    served = sum(each.served for each in accounts)
    faults = dict(sum((Counter(each.faults) for each in accounts), Counter()))
    violations = [f"{each.title}: {what}" for each in accounts for what in each.violations]
    sorts = Counter(what.partition(":")[0] for each in accounts for what in each.violations)
    if not served or not faults.keys() >= {NEW_WEIGHTS, GUEST} or len(faults) < _FEWEST_KINDS:
        violations.append(f"this run shows nothing: {served} calls served, faults {sorted(faults)}")
    return {
        "seed": seed,
        "minutes": minutes,
        "rounds": [each.title for each in accounts],
        "storm_s": sum(each.seconds for each in accounts),
        "faults": faults,
        "calls": calls,
        "checked": sum(each.checked for each in accounts),
        "found": {sort: sorts[sort] for sort in (*_SORTS, *sorts.keys() - set(_SORTS))},
        "wanted": wanted,
        "stayed": stayed,
        "served": served,
        "share_served": served / max(1, stayed),
        "most_late_s": max(each.most_late_s for each in accounts),
        "violations": violations,
    }
