"""The decode worker's composition root: builds the parts, serves, closes them in order.

    load engine → listen for KV → serve and register (`worker.process`) → receiver stops → engine closes

Knows every part and decides nothing about requests (see `worker`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from opentelemetry.trace import Tracer

from decode_worker.scheduler import StepLimits
from decode_worker.worker import DecodeWorker, WorkerParts, WorkerPolicy
from engine.graphs import MAX_CAPTURED_SEQS
from engine.loading import Engine, EngineOptions, load_engine, resolve_device
from kvtransfer.base import Fingerprints, PoolMemory, Receiver
from kvtransfer.receiver import KvReceiver
from kvtransfer.staged import stage_receiver
from kvtransfer.ticket import MAX_BLOCKS
from kvtransfer.timing import Timing
from kvtransfer.transports import SHM, choose
from tandem.checkpoint import CheckpointInfo, read_checkpoint
from tandem.clock import MonotonicClock
from tandem.config import DecodeConfig
from tandem.incarnation import new_incarnation
from tandem.rpc.address import advertised_address
from tandem.rpc.process import StopSignal, run_process
from tandem.security.credentials import Security
from tandem.security.tls import ServerTls
from tandem.telemetry.logging import configure_logging
from tandem.telemetry.loop_lag import LoopLag
from tandem.telemetry.metric import Process
from tandem.telemetry.metrics import Metrics
from tandem.telemetry.observers import WorkerObserver
from tandem.telemetry.observers_together import worker_observers
from tandem.telemetry.tracing import tracing
from tandem.types import Incarnation, Role, WorkerId, WorkerInfo
from tandem.validation import Validator
from worker.metrics import WorkerMetrics, load_reader
from worker.process import WorkerProcess
from worker.spans import sequence_spans


def run(config: DecodeConfig) -> int:
    """Runs the process until it is told to stop; returns its exit code."""
    configure_logging("decode", config.log_format, config.log_level)
    with tracing("tandem-decode", config.worker_id) as tracer:
        return run_process(partial(serve, config, tracer))


async def serve(config: DecodeConfig, tracer: Tracer | None, stop: StopSignal) -> None:
    """Loads, serves and drains one worker. Raises ConfigError, CheckpointError."""
    security = Security.load(config.security, config.ports, config.calls)
    checkpoint = read_checkpoint(config.model)
    transports = choose(config.transport, resolve_device(config.device))
    options = replace(
        EngineOptions.of_worker(config, checkpoint.path, shared_kv=SHM in transports), graph_seqs=_graph_seqs(config)
    )
    engine = await stop.unless_stopped(partial(load_engine, options))
    try:
        incarnation = new_incarnation()
        receiver = _new_receiver(config, engine, transports, incarnation, security.incoming.tls)
        metrics = Metrics(Process.DECODE, checkpoint.name, _worker_id(config, incarnation))
        observer = worker_observers(
            [*sequence_spans(tracer, Role.DECODE), WorkerMetrics(metrics, Role.DECODE, MonotonicClock())]
        )
        worker = _new_worker(config, checkpoint, engine, receiver, observer)
        metrics.add_reader(load_reader(Role.DECODE, worker.load))
        describe = partial(_describe, config, checkpoint, engine, transports, incarnation)
        await receiver.start()
        try:
            with LoopLag(metrics):
                await WorkerProcess(config, worker, incarnation, security=security, metrics=metrics).run(describe, stop)
        finally:
            await receiver.stop()
    finally:
        engine.close()


def _graph_seqs(config: DecodeConfig) -> int:
    wanted = MAX_CAPTURED_SEQS if config.cuda_graph_seqs is None else config.cuda_graph_seqs
    return min(config.max_seqs, wanted)


def _max_sequence_tokens(engine: Engine) -> int:
    """What context and pool can hold, if one ticket can name its blocks."""
    return min(engine.max_sequence_tokens, MAX_BLOCKS * engine.layout.block_size)


def _worker_id(config: DecodeConfig, incarnation: Incarnation) -> WorkerId:
    return WorkerId(config.worker_id or f"decode-{incarnation[:8]}")


def _describe(
    config: DecodeConfig,
    checkpoint: CheckpointInfo,
    engine: Engine,
    transports: tuple[str, ...],
    incarnation: Incarnation,
    address: str,
) -> WorkerInfo:
    return WorkerInfo(
        worker_id=_worker_id(config, incarnation),
        incarnation=incarnation,
        role=Role.DECODE,
        address=address,
        model=checkpoint.name,
        config_fingerprint=checkpoint.config_fingerprint,
        model_fingerprint=engine.fingerprint,
        layout_fingerprint=engine.layout.fingerprint(),
        transports=transports,
        local_prefill_tokens=config.local_prefill_tokens,
        max_sequence_tokens=_max_sequence_tokens(engine),
        pid=os.getpid(),
        device=str(engine.model.device),
        pool_tokens=engine.pool.num_blocks * engine.layout.block_size,
    )


def _new_receiver(
    config: DecodeConfig,
    engine: Engine,
    transports: tuple[str, ...],
    incarnation: Incarnation,
    tls: ServerTls | None,
) -> Receiver:
    memory = PoolMemory(engine.kv_cache.host_blocks, engine.kv_cache.shared_fd, incarnation)
    fingerprints = Fingerprints(engine.fingerprint, engine.layout)
    # Senders reach the KV endpoint at the host where routers reach the worker.
    advertised = advertised_address(config.listen, config.advertise, 1)
    receiver = KvReceiver(
        memory,
        fingerprints,
        MonotonicClock(),
        transports,
        listen_host=_host_of(config.listen),
        listen_port=config.kv_port,
        advertise_host=_host_of(advertised),
        tls=tls,
        timing=Timing(lease_s=config.lease_s),
    )
    return stage_receiver(receiver, engine.kv_cache.mirror)


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _new_worker(
    config: DecodeConfig, checkpoint: CheckpointInfo, engine: Engine, receiver: Receiver, observer: WorkerObserver
) -> DecodeWorker:
    validator = Validator(config.limits, checkpoint.vocab_size, checkpoint.context_tokens)
    parts = WorkerParts(engine.thread, engine.pool, receiver, validator, MonotonicClock(), observer)
    limits = StepLimits(config.block_size, config.max_seqs, config.chunk_tokens)
    policy = WorkerPolicy(limits, _max_sequence_tokens(engine), overlap_steps=config.overlap_steps == "auto")
    return DecodeWorker(parts, policy)
