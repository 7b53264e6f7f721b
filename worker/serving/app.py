"""What the composition roots of both workers build alike, around an engine.

    run_worker → logging, tracing, the process's loop → the role's `serve`
    serve: Foundation.lay → load the engine → the role's own parts → Foundation.serve → all closed in reverse

Knows no scheduler and no transfer; each role's `app` adds its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from opentelemetry.trace import Tracer

from engine.device_gauge import DeviceGauge
from engine.guides import Guides
from engine.loading import Engine, EngineRole, load_engine, resolve_device
from engine.prefix_cache import PrefixCache
from kvtransfer.base import DeviceMemory, Fingerprints, PartMemory, PoolMemory
from kvtransfer.sender import KvSender
from kvtransfer.transports import choose
from models.files.checkpoint import CheckpointInfo
from models.files.hub import fetched
from models.preflight import read_servable
from shell.clock import MonotonicClock
from shell.config import WorkerConfig
from shell.progress import show_in_log
from shell.rpc.process import StopSignal, run_process
from shell.telemetry.events import ProcessEvents, TransportBarred, WorkerEvents
from shell.telemetry.logging import configure_logging, get_logger
from shell.telemetry.loop_lag import LoopLag
from shell.telemetry.metric import Process
from shell.telemetry.metric_names import CUDA_GRAPH_STEPS, CUDA_GRAPHS
from shell.telemetry.metrics import Metrics
from shell.telemetry.otlp import exporting_metrics, tracing
from tandem.decision import Decision
from tandem.errors import ConfigError
from tandem.security.credentials import Security
from tandem.types import Incarnation, Role, WorkerId, WorkerInfo, new_incarnation
from tandem.validation import Validator
from worker.core import Worker
from worker.ports import WorkerParts
from worker.serving.cache_reports import CacheListeners, CacheReports
from worker.serving.kv_events import KvEvents
from worker.serving.metrics import WorkerMetrics, cache_readings, graph_readings, load_readings, wait_readings
from worker.serving.process import WorkerProcess
from worker.serving.rank_watch import RankWatch
from worker.serving.spans import SequenceSpans

_log = get_logger(__name__)

C = TypeVar("C", bound=WorkerConfig)
_ROLES = {
    role: Decision("role", role, why, force)
    for role, why, force in (
        (Role.PREFILL, "computes prompts for decode workers, as it was started", "tandem serve --workers"),
        (Role.DECODE, "decodes what prefill workers computed, as it was started", "tandem serve --workers"),
        (
            Role.ELASTIC,
            "computes prompts, for others too, and decodes, as each request and step needs",
            "tandem serve --prefill and --decode",
        ),
    )
}
SWITCH_INTERVAL_S = 0.0002
"""Longest time for which the engine's thread, launching kernels on a GPU, keeps the interpreter from the event loop.
Instead of Python's 5 ms: on an H200, 32 and 64 streams of an 8B model get 4 and 9 % more tokens per second."""


def run_worker(role: Role, config: C, serve: Callable[[C, Tracer | None, StopSignal], Awaitable[None]]) -> int:
    """Runs a worker's process until a stop is asked for; returns its exit code. Raises CheckpointError, ConfigError."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure_logging(role.value, config.log_format, config.log_level)
    show_in_log()
    config = replace(config, model=fetched(config.model))
    with tracing(f"tandem-{role.value}", config.worker_id) as tracer:
        return run_process(partial(serve, config, tracer))


@dataclass(frozen=True, slots=True)
class Foundation:
    """All that a worker has whatever its role, before its engine is loaded."""

    role: Role
    config: WorkerConfig
    security: Security
    checkpoint: CheckpointInfo
    transports: tuple[str, ...]
    why_these: Decision
    incarnation: Incarnation
    worker_id: WorkerId
    metrics: Metrics
    events: WorkerEvents
    clock: MonotonicClock

    @classmethod
    def lay(cls, role: Role, config: WorkerConfig, tracer: Tracer | None) -> Foundation:
        """Reads certificates and checkpoint. Raises ConfigError, CheckpointError."""
        security = Security.load(config.security, config.ports, config.calls)
        checkpoint = read_servable(config.model, config.model_impl).checkpoint.within(config.context_tokens)
        transports, why_these = choose(config.transport, resolve_device(config.device), config.num_ranks)
        incarnation, clock = new_incarnation(), MonotonicClock()
        worker_id = WorkerId(config.worker_id or f"{role.value}-{incarnation[:8]}")
        metrics = Metrics(Process(role.value), checkpoint.name, worker_id)
        spans = () if tracer is None else (SequenceSpans(tracer, role).hear,)
        events: WorkerEvents = ProcessEvents(*spans, WorkerMetrics(metrics, clock).hear)
        return cls(
            *(role, config, security, checkpoint, transports, why_these),
            *(incarnation, worker_id, metrics, events, clock),
        )

    @property
    def validator(self) -> Validator:
        """Judges requests by the config's limits and the model's sizes."""
        return Validator(self.config.limits, self.checkpoint.vocab_size, self.checkpoint.context_tokens)

    @asynccontextmanager
    async def engine(self, role: EngineRole, stop: StopSignal) -> AsyncIterator[Engine]:
        """Loads the engine, and closes it at the end. Raises ConfigError, CheckpointError.

        So it does if a file of the config or tokenizer is another than `checkpoint` was read from.
        """
        engine = await stop.unless_stopped(partial(load_engine, self.config, role))
        try:
            self.checkpoint.read.check()
            self.metrics.add_reader(partial(graph_readings, engine.graphs), CUDA_GRAPHS, CUDA_GRAPH_STEPS)
            with nullcontext() if engine.ranks is None else RankWatch(engine.ranks, stop):
                yield engine
        finally:
            engine.close()

    def pool_memory(self, engine: Engine) -> PoolMemory:
        """Returns the pool as transfers see its memory."""
        cache, allocation = engine.kv_cache, engine.kv_cache.allocation
        device = None
        if allocation is not None:
            device = DeviceMemory(cache.blocks_view, allocation.shared_fd, allocation.size_bytes)
        parts = () if engine.ranks is None else engine.ranks.parts
        followers = tuple(PartMemory(part.blocks_view, part.shared_fd) for part in parts)
        return PoolMemory(cache.host_rows, cache.shared_fd, self.incarnation, cache.staging, device, followers)

    def sender(self, engine: Engine) -> KvSender:
        """Returns a new sender, for its caller to stop."""
        return KvSender(
            self.pool_memory(engine),
            self.fingerprints(engine),
            self.clock,
            self.config.transport,
            tls=self.security.outgoing.tls,
            on_barred=lambda transport: self.events.emit(TransportBarred(transport)),
        )

    def parts(self, engine: Engine, guides: Guides) -> WorkerParts:
        """Returns what the core works with."""
        gauge = DeviceGauge(engine.model.device, self.clock)
        return WorkerParts(
            *(engine.thread, engine.cache, engine.sizes, self.validator, self.clock, self.events, guides), gauge
        )

    def fingerprints(self, engine: Engine) -> Fingerprints:
        """What the other side of a transfer must share."""
        return Fingerprints(engine.model.fingerprint, engine.layout)

    def info(self, engine: Engine) -> WorkerInfo:
        """Returns what routers learn; address and the role's own fields are filled in later."""
        return WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            address="",
            model=self.checkpoint.name,
            config_fingerprint=self.checkpoint.config_fingerprint,
            model_fingerprint=engine.model.fingerprint,
            layout_fingerprint=engine.layout.fingerprint(),
            transports=self.transports,
            local_prefill_tokens=0,
            max_sequence_tokens=engine.sizes.max_sequence_tokens,
            pid=os.getpid(),
            device=str(engine.model.device),
            max_seqs=engine.sizes.max_seqs,
            decisions=(_ROLES[self.role], *engine.decisions, self.why_these),
        )

    async def serve(self, core: Worker, info: WorkerInfo, stop: StopSignal, cache: PrefixCache) -> None:
        """Serves until a stop is asked for, then drains. Raises ConfigError if an address cannot be had."""
        self.metrics.add_reader(lambda: load_readings(self.role, core.load()))
        self.metrics.add_reader(lambda: wait_readings(core.waits()))
        self.metrics.add_reader(lambda: cache_readings(cache.counters))
        exporting = exporting_metrics(self.metrics, f"tandem-{self.role.value}", self.config.worker_id)
        with LoopLag(self.metrics), exporting, self._telling_of(cache) as reports:
            process = WorkerProcess(self.config, core, self.incarnation, self.metrics, reports, security=self.security)
            await process.run(lambda address: replace(info, address=address), stop)

    @contextmanager
    def _telling_of(self, cache: PrefixCache) -> Iterator[CacheReports | None]:
        """Reports to routers and to subscribers what the cache holds; None if there is no cache."""
        config = self.config
        if not config.prefix_cache:
            if config.kv_events:
                raise ConfigError("--kv-events", "needs --prefix-cache")
            yield None
            return
        cache.listener = reports = CacheReports(cache)
        if not config.kv_events:
            yield reports
            return
        with KvEvents(config) as events:
            cache.listener = CacheListeners((reports, events))
            try:
                yield reports
            finally:
                cache.listener = reports
