"""Grows and shrinks a running cluster, then restarts all of it, under load: the claim `scaling` of `bench.claims`.

Real processes on this machine: two routers, and workers from 1+1 to 2+2 and back, each pool by itself; then a
rolling restart of everything, as a Deployment with one surge pod does it. Meanwhile callers never pause, and
check every token (`bench.support.witness`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import uvloop

from bench.support.cluster import eventually
from bench.support.fleet import Exit, Fleet
from bench.support.ports import free_ports
from bench.support.witness import Account, Witness, story_questions
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
    def requests(self) -> int:
        """Of all phases."""
        return sum(each.requests for each in self.accounts)


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
        witness = Witness(fleet.target, callers, story_questions(8, max_tokens))
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
