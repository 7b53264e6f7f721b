"""Grows and shrinks a running cluster, then restarts all of it, under load: `python -m bench.scaling`.

Real processes on this machine: two routers, and workers from 1+1 to 2+2 and back, each pool by itself; then a
rolling restart of everything, as a Deployment with one surge pod does it. Meanwhile callers never pause, and
check every token (`bench.support.witness`). Exit code 1 if a request failed, a token was wrong or a process did not
leave with code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial

import uvloop

from bench.record import write_record
from bench.support.cluster import eventually
from bench.support.fleet import Exit, Fleet
from bench.support.markdown import table
from bench.support.ports import free_ports
from bench.support.witness import Account, Witness
from tandem.types import Role

NUM_ROUTERS = 2
LONGEST_S = 1200.0
"""Whatever hangs, the walk ends; it takes a minute on idle cores."""

MIN_READY_S = 10.0
"""A rolling update goes on that long after a new router said SERVING (`minReadySeconds` in `deploy/`): callers must
have come back to it by then, or the update would take their last router away."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the callers saw, phase by phase, and how each process left."""

    callers: int
    max_tokens: int
    accounts: tuple[Account, ...]
    exits: tuple[Exit, ...]
    errors: tuple[str, ...]

    @property
    def flawless(self) -> bool:
        """Whether every request ended with its right tokens, and every process with code 0."""
        return not self.errors and all(each.code == 0 for each in self.exits)


class Scenario:
    """One walk through all changes."""

    def __init__(self, fleet: Fleet, witness: Witness, requests_per_phase: int) -> None:
        self._fleet = fleet
        self._witness = witness
        self._requests = requests_per_phase
        self.exits: list[Exit] = []

    async def run(self) -> None:
        """Every phase. The fleet must be at 1+1 (`prefill-0`, `decode-0`)."""
        await self._phase("1+1")
        await self._phase("prefill 1 to 2", lambda: self._join(Role.PREFILL, 1))
        await self._phase("decode 1 to 2", lambda: self._join(Role.DECODE, 1))
        await self._phase("2+2")
        await self._phase("prefill 2 to 1", lambda: self._leave("prefill-0"))
        await self._phase("decode 2 to 1", lambda: self._leave("decode-0"))
        for index in range(NUM_ROUTERS):
            await self._phase(f"restart router-{index}", partial(self._restart_router, index))
        await self._phase("restart prefill", lambda: self._replace(Role.PREFILL))
        await self._phase("restart decode", lambda: self._replace(Role.DECODE))
        await self._phase("1+1 again")

    async def _phase(self, name: str, change: Callable[[], Awaitable[None]] | None = None) -> None:
        self._witness.phase = name
        if change is not None:
            await change()
        await self._witness.see(self._requests)

    async def _join(self, role: Role, index: int) -> None:
        await asyncio.to_thread(self._fleet.start_worker, role, f"{role.value}-{index}")

    async def _leave(self, name: str) -> None:
        self.exits.append(await asyncio.to_thread(self._fleet.stop, name))

    async def _restart_router(self, index: int) -> None:
        """Raises RuntimeError if callers do not come back to it in time."""
        await self._leave(f"router-{index}")
        name = await asyncio.to_thread(self._fleet.start_router, index)
        if not await asyncio.to_thread(eventually, lambda: self._fleet.is_used(name), MIN_READY_S):
            raise RuntimeError(f"no caller came back to {name} within {MIN_READY_S:g} s")

    async def _replace(self, role: Role) -> None:
        """One more, then one less: what a rolling update with a surge of one does."""
        await self._join(role, 2)
        await self._leave(f"{role.value}-1")


def run(callers: int, max_tokens: int, requests_per_phase: int, transport: str) -> Outcome:
    """The whole walk, on a cluster of its own."""

    async def walk(fleet: Fleet) -> tuple[Witness, Scenario]:
        witness = Witness(fleet.target, callers, max_tokens)
        scenario = Scenario(fleet, witness, requests_per_phase)
        async with asyncio.timeout(LONGEST_S), witness.watching():
            await scenario.run()
        return witness, scenario

    with Fleet(free_ports(NUM_ROUTERS), options=("--transport", transport)) as fleet:
        for index in range(NUM_ROUTERS):
            fleet.start_router(index)
        fleet.start_worker(Role.PREFILL, "prefill-0")
        fleet.start_worker(Role.DECODE, "decode-0")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            witness, scenario = runner.run(walk(fleet))
        exits = [*scenario.exits, *(fleet.stop(name) for name in fleet.names)]
    errors = tuple(f"{each.phase}: {each.error}" for each in witness.sightings if each.error)
    return Outcome(callers, max_tokens, tuple(witness.accounts()), tuple(exits), errors)


def render(outcome: Outcome) -> str:
    """The figures, for people."""
    header = ("phase", "requests", "failed", "wrong", "tokens", "TTFT p50 ms", "max", "longest gap p50 ms", "max")
    rows = [
        (
            *(each.phase, *map(str, (each.requests, each.failed, each.wrong, each.tokens))),
            *(f"{ms:.0f}" for ms in (each.ttft_p50_ms, each.ttft_max_ms, each.gap_p50_ms, each.gap_max_ms)),
        )
        for each in outcome.accounts
    ]
    exits = [(each.name, str(each.code), f"{each.seconds:.2f}") for each in outcome.exits]
    parts = [table(header, rows), table(("process", "exit code", "SIGTERM to end, s"), exits), *outcome.errors]
    return "\n".join(parts)


def main() -> int:
    """Runs, prints, records; exit code 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--callers", type=int, default=8, help="requests under way at any time")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--requests", type=int, default=40, help="requests to see after each change")
    parser.add_argument("--transport", default="auto", help="how KV blocks travel")
    parser.add_argument("--record", action="store_true", help="write bench/results/scaling.json and the page")
    options = parser.parse_args()
    outcome = run(options.callers, options.max_tokens, options.requests, options.transport)
    print(render(outcome))
    if options.record:
        write_record("scaling", json.loads(json.dumps(asdict(outcome))))
    return 0 if outcome.flawless else 1


if __name__ == "__main__":
    sys.exit(main())
