"""One life of a worker process around its core: serve, register, drain. The same for both roles.

    serve (NOT_SERVING) → `ready HOST:PORT` → a router registers it → SERVING
    SIGTERM             → NOT_SERVING, no new work → what was begun ends → streams end

Knows nothing of engines and transfers: the workers' `app` builds and closes those.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

from shell.admin.content import AdminContent, WorkerReport
from shell.admin.history import History
from shell.admin.port import admin_port
from shell.clock import Clock, MonotonicClock
from shell.config import WorkerConfig
from shell.rpc.address import advertised_address
from shell.rpc.process import StopSignal
from shell.rpc.server import RpcServer, Service
from shell.telemetry.logging import get_logger
from shell.telemetry.metrics import Metrics
from tandem import __version__
from tandem.security.credentials import Security
from tandem.types import Incarnation, WorkerInfo, WorkerLoad
from tandem.v1 import worker_pb2_grpc
from worker.core import Worker
from worker.serving.announcer import Announcer
from worker.serving.cache_reports import CacheReports
from worker.serving.service import SERVICE_NAME, WorkerServicer

_log = get_logger(__name__)

STALL_S = 120.0
"""After so long without a step, with sequences in the batch, the process should be ended. Four times the silence after
which routers try elsewhere: that costs them little, whereas a new process loads its weights again."""
_WATCH_EVERY_S = 1.0
_PLAIN = Security()


class ProgressWatch:
    """Whether an engine makes progress: it has nothing to run, or makes steps. Asked a few times per `stall_s`."""

    def __init__(self, clock: Clock, stall_s: float = STALL_S) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._moved_s = clock.now_s()
        self._engine_steps: int | None = None

    def observe(self, load: WorkerLoad) -> bool:
        """Whether the engine makes progress, as of now."""
        if load.running_seqs == 0 or load.engine_steps != self._engine_steps:
            self._moved_s = self._clock.now_s()
        self._engine_steps = load.engine_steps
        return self._clock.now_s() - self._moved_s < self._stall_s


class WorkerProcess:
    """Serves a core to routers until a stop is asked for."""

    def __init__(
        self,
        config: WorkerConfig,
        core: Worker,
        incarnation: Incarnation,
        metrics: Metrics,
        reports: CacheReports | None = None,
        *,
        security: Security = _PLAIN,
        progress: ProgressWatch | None = None,
        watch_every_s: float = _WATCH_EVERY_S,
    ) -> None:
        """`reports`: of the worker's prefix cache, if it has one.

        `progress` judges the engine's load, every `watch_every_s`.
        """
        self._config = config
        self._core = core
        self._security = security
        self._metrics = metrics
        self._clock = MonotonicClock()
        self._history = History(lambda: {"used": self._core.load().pool.num_used})
        self._progress = progress or ProgressWatch(self._clock)
        self._watch_every_s = watch_every_s
        servicer = WorkerServicer(core, incarnation, reports)
        register = partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer)
        service = Service(SERVICE_NAME, register, long_lived=True)
        self._server = RpcServer(
            config.listen,
            [service],
            incoming=security.incoming,
            max_receive_bytes=config.limits.max_message_bytes,
            metrics=metrics,
        )

    async def run(self, info_at: Callable[[str], WorkerInfo], stop: StopSignal) -> None:
        """Serves until a stop is asked for. `info_at` describes the worker, given its address.

        Raises ConfigError if the address cannot be had.
        """
        port = await self._server.start()
        info = info_at(advertised_address(self._config.listen, self._config.advertise, port))
        try:
            with self._history:
                async with self._admin_port(info) as admin_address:
                    await self._work(replace(info, admin_address=admin_address), stop)
        finally:
            await self._server.drain(grace_s=0)

    async def _work(self, info: WorkerInfo, stop: StopSignal) -> None:
        if not self._config.router:
            _log.warning("no router is named, so nobody sends requests here: give --router HOST:PORT")
        announcer = Announcer(
            self._config.router,
            info,
            self._core.load,
            self._refuse_new_work,
            on_registered=self._take_work,
            outgoing=self._security.outgoing,
        )
        async with asyncio.TaskGroup() as tasks:
            background = (
                tasks.create_task(self._core.run(), name="step-loop"),
                tasks.create_task(announcer.run(), name="announcer"),
                tasks.create_task(self._watch_progress(), name="liveness"),
            )
            # What was loaded lives until the end: full collections that visit it again would take tens of milliseconds.
            gc.collect()
            gc.freeze()
            print(f"ready {info.address}", flush=True)
            await stop.wait()
            await self._drain(announcer)
            for task in background:
                task.cancel()

    def _admin_port(self, info: WorkerInfo) -> AbstractAsyncContextManager[str]:
        began_s = self._clock.now_s()

        def report() -> WorkerReport:
            return WorkerReport(
                process=info.role,
                version=__version__,
                uptime_s=self._clock.now_s() - began_s,
                ready=self._server.health.serving,
                info=info,
                load=self._core.load(),
            )

        content = AdminContent(
            health=self._server.health,
            report=report,
            history=self._history.report,
            metrics=self._metrics.exposition,
        )
        return admin_port(self._config.admin_listen, content, self._security.incoming, self._config.advertise)

    async def _watch_progress(self) -> None:
        """Sets liveness by the engine's steps, until cancelled: a loop that answers proves nothing about its engine."""
        alive = True
        while True:
            if self._progress.observe(self._core.load()) != alive:
                alive = not alive
                _log.warning("engine makes steps again" if alive else "engine makes no steps while sequences run")
                self._server.health.set_alive(alive)
            await asyncio.sleep(self._watch_every_s)

    def _take_work(self) -> None:
        """A router has registered us. Ready no sooner: a rolling update waits for workers that are in use."""
        if not self._core.load().draining:
            self._server.set_serving(True)

    def _refuse_new_work(self) -> None:
        self._core.drain()
        self._server.set_serving(False)

    async def _drain(self, announcer: Announcer) -> None:
        self._refuse_new_work()
        announcer.announce_now()
        try:
            await asyncio.wait_for(self._core.drained(), self._config.drain_grace_s)
        except TimeoutError:
            _log.warning("work was left at the end of the drain", grace_s=self._config.drain_grace_s)
