"""A whole simulated deployment: one router, workers of some roles, a trace, and workers that are lost and come back."""

from __future__ import annotations

import asyncio
import enum
import math
from dataclasses import dataclass
from random import Random
from typing import cast

from router.admission import Admission, AdmissionQueue
from router.worker_link import WorkerLink
from router.workers import Workers
from simulator.costs import CostModel
from simulator.engine import Host
from simulator.loop import SimulatedClock, run_simulated
from simulator.outcomes import Outcome, Result, RoleUse
from simulator.requests import Attempt, Rooms, serve
from simulator.traces import Trace, rate_of
from simulator.transfers import Network
from simulator.worker import MODEL, SimulatedWorker
from tandem.errors import InternalError
from tandem.types import Role, WorkerId, WorkerInfo

_NEVER_S = 1e9
_MANY = 1_000_000_000


class Policy(enum.StrEnum):
    """Who computes prompts."""

    STATIC = "static"
    """Prefill workers."""
    COLOCATED = "colocated"
    """Each decode worker, those of its own requests, in chunks of a fixed size."""
    AUTO = "auto"
    """Elastic workers; placement decides where a prompt is computed."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many workers of which kind."""

    policy: Policy
    decodes: int
    """All workers, where there are no prefill workers."""
    prefills: int = 0

    @property
    def num_workers(self) -> int:
        """Number of workers of all roles."""
        return self.prefills + self.decodes

    @property
    def name(self) -> str:
        """For tables."""
        if self.policy is Policy.STATIC:
            return f"{self.prefills}P{self.decodes}D"
        return f"{self.decodes} {self.policy}"

    @property
    def roles(self) -> list[Role]:
        """Role of each worker."""
        decode = Role.ELASTIC if self.policy is Policy.AUTO else Role.DECODE
        return [Role.PREFILL] * self.prefills + [decode] * self.decodes


@dataclass(frozen=True, slots=True)
class Failures:
    """Every `every_s` one worker, drawn at random, is lost; it is back after `back_after_s`."""

    every_s: float
    back_after_s: float


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated."""

    fleet: Fleet
    costs: CostModel
    failures: Failures | None = None
    max_active: int = _MANY
    """Most requests under way at a time; further requests wait at the router."""
    seed: int = 0


def simulate(setup: Setup, trace: Trace) -> Result:
    """Replays `trace`, which is not empty, to the end of its last request. Equal arguments, equal results."""
    return run_simulated(_Cluster(setup).replay(trace))


class _Cluster:
    """One simulation."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._rng = Random(setup.seed)
        self._num_lost = 0

    async def replay(self, trace: Trace) -> Result:
        setup = self._setup
        clock = SimulatedClock()
        network = Network(setup.costs)
        workers = Workers(MODEL, MODEL, clock, _NEVER_S, _NEVER_S, self._open_link, self._rng)
        self._workers = workers
        self._named: dict[WorkerId, SimulatedWorker] = {}
        computes = setup.fleet.policy is not Policy.STATIC
        for number, role in enumerate(setup.fleet.roles):
            name = f"{role}-{number}"
            if number % setup.costs.workers_per_host == 0:
                host = Host(setup.costs.sharing)
            worker = SimulatedWorker(
                name,
                role,
                setup.costs,
                network,
                host,
                workers.heartbeat,
                computes_prompts=computes,
                seed=setup.seed,
            )
            self._named[WorkerId(name)] = worker
            worker.come()
        admission = Admission(AdmissionQueue(setup.max_active, _MANY, _MANY), clock)
        rooms = Rooms(workers, admission, self._named, clock, setup.costs.message_s)
        failing = asyncio.create_task(self._fail_workers()) if setup.failures else None
        outcomes = await self._serve_all(rooms, trace)
        if failing is not None:
            failing.cancel()
        span_s = max(each.ended_s for each in outcomes) - trace[0].at_s
        uses = self._uses(asyncio.get_running_loop().time())
        await self._settle()
        rate = rate_of(trace)
        return Result(
            outcomes,
            span_s,
            rate if math.isfinite(rate) else len(trace) / max(span_s, 1e-9),
            uses,
            dict(sorted(rooms.placements.items())),
            network.num_bytes,
            self._num_lost,
        )

    async def _serve_all(self, rooms: Rooms, trace: Trace) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[Outcome]] = []
        for number, ask in enumerate(trace):
            if ask.at_s > loop.time():
                await asyncio.sleep(ask.at_s - loop.time())
            tasks.append(asyncio.create_task(serve(rooms, ask, number)))
        return list(await asyncio.gather(*tasks))

    async def _fail_workers(self) -> None:
        failures = self._setup.failures
        assert failures is not None
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(failures.every_s)
            up = [worker for worker in self._named.values() if worker.is_up]
            if not up:
                continue
            worker = self._rng.choice(up)
            self._num_lost += 1
            info = worker.info
            ports = worker.go()
            self._workers.deregister(info)
            for port in ports:
                cast(Attempt, port).lost(info.incarnation)
            loop.call_later(failures.back_after_s, worker.come)

    async def _settle(self) -> None:
        """Lets releases arrive; every worker must be idle then. Raises InternalError."""
        awaited = list(self._named.values())
        for _ in range(200):
            await asyncio.sleep(1.0)
            try:
                while awaited:  # nothing comes to one that is idle
                    awaited[-1].check_idle()
                    awaited.pop()
            except InternalError as error:
                last = error
            else:
                break
        else:
            raise last
        for worker in self._named.values():
            worker.stop()

    def _uses(self, seconds: float) -> dict[str, RoleUse]:
        by_role: dict[str, list[SimulatedWorker]] = {}
        for worker in self._named.values():
            by_role.setdefault(worker.role, []).append(worker)
        uses: dict[str, RoleUse] = {}
        for role, workers in by_role.items():
            worker_s = len(workers) * max(seconds, 1e-9)
            uses[role] = RoleUse(
                len(workers),
                sum(worker.use[0] for worker in workers) / worker_s,
                sum(worker.use[1] for worker in workers) / worker_s,
                sum(worker.queued_tokens_s for worker in workers) / worker_s,
                sum(worker.pool_share_s for worker in workers) / worker_s,
            )
        return uses

    def _open_link(self, info: WorkerInfo, on_change: object) -> WorkerLink:
        return cast(WorkerLink, self._named[info.worker_id].link)
