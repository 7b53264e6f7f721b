"""The prefill worker's composition root: builds the parts, serves, closes them in order.

    load engine → serve and register (`tandem.rpc.worker_process`) → sender stops → engine closes

Knows every part and decides nothing about prompts (see `worker`).
"""

from __future__ import annotations

import os
from functools import partial

from opentelemetry.trace import Tracer

from engine.loading import Engine, EngineOptions, load_engine
from kvtransfer.base import Fingerprints, PoolMemory, Sender
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from kvtransfer.transports import choose
from prefill_worker.handoff import HandoffPolicy
from prefill_worker.scheduler import BatchLimits
from prefill_worker.worker import PrefillWorker, WorkerParts
from tandem.checkpoint import CheckpointInfo, read_checkpoint
from tandem.clock import MonotonicClock
from tandem.config import PrefillConfig
from tandem.incarnation import new_incarnation
from tandem.rpc.process import StopSignal, run_process
from tandem.rpc.worker_process import WorkerProcess
from tandem.security.credentials import Security
from tandem.security.tls import ClientTls
from tandem.telemetry.logging import configure_logging
from tandem.telemetry.loop_lag import LoopLag
from tandem.telemetry.metric import Process
from tandem.telemetry.metrics import Metrics
from tandem.telemetry.observers import WorkerObserver
from tandem.telemetry.observers_together import worker_observers
from tandem.telemetry.sequence_spans import sequence_spans
from tandem.telemetry.tracing import tracing
from tandem.telemetry.worker_metrics import WorkerMetrics, load_reader
from tandem.types import Incarnation, Role, WorkerId, WorkerInfo
from tandem.validation import Validator


def run(config: PrefillConfig) -> int:
    """Runs the process until it is told to stop; returns its exit code."""
    configure_logging("prefill", config.log_format, config.log_level)
    with tracing("tandem-prefill", config.worker_id) as tracer:
        return run_process(partial(serve, config, tracer))


async def serve(config: PrefillConfig, tracer: Tracer | None, stop: StopSignal) -> None:
    """Loads, serves and drains one worker. Raises ConfigError, CheckpointError."""
    security = Security.load(config.security, config.ports, config.calls)
    checkpoint = read_checkpoint(config.model)
    options = EngineOptions.of_worker(config, checkpoint.path, shared_kv=False)
    engine = await stop.unless_stopped(partial(load_engine, options))
    try:
        transports = choose(config.transport, engine.model.device)
        incarnation = new_incarnation()
        sender = _new_sender(config, engine, incarnation, security.outgoing.tls)
        metrics = Metrics(Process.PREFILL, checkpoint.name, _worker_id(config, incarnation))
        observer = worker_observers(
            [*sequence_spans(tracer, Role.PREFILL), WorkerMetrics(metrics, Role.PREFILL, MonotonicClock())]
        )
        worker = _new_worker(config, checkpoint, engine, sender, observer)
        metrics.add_reader(load_reader(Role.PREFILL, worker.load))
        describe = partial(_describe, config, checkpoint, engine, transports, incarnation)
        try:
            with LoopLag(metrics):
                await WorkerProcess(config, worker, incarnation, security=security, metrics=metrics).run(describe, stop)
        finally:
            await sender.stop()
    finally:
        engine.close()


def _worker_id(config: PrefillConfig, incarnation: Incarnation) -> WorkerId:
    return WorkerId(config.worker_id or f"prefill-{incarnation[:8]}")


def _describe(
    config: PrefillConfig,
    checkpoint: CheckpointInfo,
    engine: Engine,
    transports: tuple[str, ...],
    incarnation: Incarnation,
    address: str,
) -> WorkerInfo:
    return WorkerInfo(
        worker_id=_worker_id(config, incarnation),
        incarnation=incarnation,
        role=Role.PREFILL,
        address=address,
        model=checkpoint.name,
        config_fingerprint=checkpoint.config_fingerprint,
        model_fingerprint=engine.fingerprint,
        layout_fingerprint=engine.layout.fingerprint(),
        transports=transports,
        local_prefill_tokens=0,
        max_sequence_tokens=engine.max_sequence_tokens,
        pid=os.getpid(),
        device=str(engine.model.device),
    )


def _new_sender(config: PrefillConfig, engine: Engine, incarnation: Incarnation, tls: ClientTls | None) -> Sender:
    memory = PoolMemory(engine.kv_cache.host_blocks, engine.kv_cache.shared_fd, incarnation, engine.kv_cache.mirror)
    fingerprints = Fingerprints(engine.fingerprint, engine.layout)
    timing = Timing(lease_s=config.lease_s)
    return KvSender(memory, fingerprints, MonotonicClock(), config.transport, tls=tls, timing=timing)


def _new_worker(
    config: PrefillConfig, checkpoint: CheckpointInfo, engine: Engine, sender: Sender, observer: WorkerObserver
) -> PrefillWorker:
    validator = Validator(config.limits, checkpoint.vocab_size, checkpoint.context_tokens)
    parts = WorkerParts(engine.thread, engine.pool, sender, validator, MonotonicClock(), observer)
    limits = BatchLimits(config.chunk_tokens, config.max_seqs)
    return PrefillWorker(parts, limits, HandoffPolicy(overlap=config.overlap), engine.max_sequence_tokens)
