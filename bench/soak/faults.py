"""What a soak does to a cluster: kills, stops, freezes, drains and resets, drawn at random, one after the other.

Touches children of one `tandem serve` only, by the names that it gave them. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from bench.support.processes import children
from bench.support.resetting_proxy import ResettingProxy
from shell.clock import MonotonicClock
from tandem.client import AsyncClient
from tandem.errors import TandemError

_LEAST_PAUSE_S = 0.2
_MOST_PAUSE_S = 8.0
"""Between two faults at one worker of each role: a process needs seconds to come back. Of several, sooner."""
_WORKER_FREEZE_S = (0.2, 7.0)
"""Shorter and longer than a lease."""
_ROUTER_FREEZE_S = (0.2, 2.0)
_DRAIN_TIMEOUT_S = 3.0
_DRAIN_S = (0.5, 3.0)
"""From the order to drain to the stop, as an operator gives them."""
ROUTER = "router"


class Faults:
    """Draws and does. `counts` says how often each was done."""

    def __init__(
        self,
        serve_pid: int,
        num_workers: int,
        operator: AsyncClient,
        proxies: Sequence[ResettingProxy],
        rng: Random,
        say: Callable[[str], None],
    ) -> None:
        """`num_workers` of each role; `say` hears of each fault as it is done."""
        self._serve_pid = serve_pid
        self._most_pause_s = _MOST_PAUSE_S / num_workers
        self._operator = operator
        self._proxies = proxies
        self._rng = rng
        self._say = say
        self._clock = MonotonicClock()
        self.counts: Counter[str] = Counter()
        self.router_troubled_s = 0.0
        """When the router was last killed, or went on after a freeze; clock time."""

    async def run(self) -> None:
        """Until it is cancelled. What it froze goes on then, and what it drained is stopped."""
        acts = {self._kill: 4, self._stop: 2, self._freeze: 4, self._drain: 1, self._reset: 4}
        acts |= {self._kill_router: 1, self._freeze_router: 1}
        while True:
            await asyncio.sleep(self._rng.uniform(_LEAST_PAUSE_S, self._most_pause_s))
            (act,) = self._rng.choices(list(acts), list(acts.values()))
            await act()

    def _victim(self) -> tuple[str, int] | None:
        """A worker that has a process now; drawn by role first, so that no role is spared."""
        place, of_role = self._rng.random(), self._rng.random()
        workers = sorted((name, pid) for name, pid in children(self._serve_pid).items() if name != ROUTER)
        roles = sorted({name.partition("-")[0] for name, _ in workers})
        if not roles:
            return None
        role = roles[int(place * len(roles))]
        same = [each for each in workers if each[0].startswith(role)]
        return same[int(of_role * len(same))]

    async def _kill(self) -> None:
        self._signal("kill", self._victim(), signal.SIGKILL)

    async def _stop(self) -> None:
        self._signal("stop", self._victim(), signal.SIGTERM)

    async def _freeze(self) -> None:
        seconds = self._rng.uniform(*_WORKER_FREEZE_S)
        await self._frozen("freeze", self._victim(), seconds)

    async def _kill_router(self) -> None:
        self._signal("kill router", self._router(), signal.SIGKILL)
        self.router_troubled_s = self._clock.now_s()

    async def _freeze_router(self) -> None:
        await self._frozen("freeze router", self._router(), self._rng.uniform(*_ROUTER_FREEZE_S))
        self.router_troubled_s = self._clock.now_s()

    async def _drain(self) -> None:
        victim = self._victim()
        if victim is None:
            return
        self._count("drain", victim[0])
        try:
            with contextlib.suppress(TandemError):  # the router is away, or the worker has left meanwhile
                await self._operator.drain(victim[0], timeout_s=_DRAIN_TIMEOUT_S)
            await asyncio.sleep(self._rng.uniform(*_DRAIN_S))
        finally:  # it would stay as it is for ever
            if victim[1] in children(self._serve_pid).values():
                self._signal("stop after drain", victim, signal.SIGTERM)

    async def _reset(self) -> None:
        sides = self._rng.choice(self._proxies).reset()
        self._count("reset connections", f"{sides} sides")

    def _router(self) -> tuple[str, int] | None:
        pid = children(self._serve_pid).get(ROUTER)
        return None if pid is None else (ROUTER, pid)

    def _signal(self, what: str, victim: tuple[str, int] | None, number: signal.Signals) -> None:
        if victim is not None:
            self._count(what, victim[0])
            with contextlib.suppress(ProcessLookupError):  # it ended by itself this moment
                os.kill(victim[1], number)

    async def _frozen(self, what: str, victim: tuple[str, int] | None, seconds: float) -> None:
        self._signal(what, victim, signal.SIGSTOP)
        if victim is None:
            return
        try:
            await asyncio.sleep(seconds)
        finally:
            if victim[1] in children(self._serve_pid).values():  # not somebody else's by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim[1], signal.SIGCONT)
            self._say(f"{victim[0]} goes on")

    def _count(self, what: str, whom: str) -> None:
        self.counts[what] += 1
        self._say(f"{what}: {whom}")
