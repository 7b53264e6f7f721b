"""The decode worker's composition root: builds the parts, serves, stops them in order.

    load engine → listen for KV → serve (NOT_SERVING) → register → `ready HOST:PORT` → SERVING
    SIGTERM     → NOT_SERVING, no new work → sequences end → streams end → KV endpoint closes → exit 0

Knows every part and decides nothing about sequences (see `worker`).
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

import torch

from decode_worker.scheduler import StepLimits
from decode_worker.worker import DecodeWorker, WorkerParts, WorkerPolicy
from engine.loading import Engine, EngineOptions, load_engine, resolve_device
from engine.placement import ThreadPlacement
from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.transports import AUTO, SHM, available
from tandem.checkpoint import CheckpointInfo, read_checkpoint
from tandem.clock import MonotonicClock
from tandem.config import DecodeConfig
from tandem.errors import ConfigError
from tandem.incarnation import new_incarnation
from tandem.rpc.address import advertised_address
from tandem.rpc.announcer import Announcer
from tandem.rpc.process import StopSignal, run_process
from tandem.rpc.server import RpcServer, Service
from tandem.rpc.worker_service import SERVICE_NAME, WorkerServicer
from tandem.telemetry.logging import configure_logging, get_logger
from tandem.types import Incarnation, Role, WorkerId, WorkerInfo
from tandem.v1 import worker_pb2_grpc
from tandem.validation import Validator

_log = get_logger(__name__)


def run(config: DecodeConfig) -> int:
    """Runs the process until it is told to stop; returns its exit code."""
    configure_logging("decode", config.log_format, config.log_level)
    return run_process(partial(serve, config))


async def serve(config: DecodeConfig, stop: StopSignal) -> None:
    """Loads, serves and drains one worker. Raises ConfigError, CheckpointError."""
    checkpoint = read_checkpoint(config.model)
    transports = transports_for(config.transport, resolve_device(config.device))
    options = _engine_options(config, checkpoint, shared_kv=SHM in transports)
    engine = await asyncio.to_thread(load_engine, options)
    try:
        await DecodeProcess(config, checkpoint, engine, transports).run(stop)
    finally:
        engine.close()


class DecodeProcess:
    """One life of a decode worker around a loaded engine, which it does not close."""

    def __init__(
        self, config: DecodeConfig, checkpoint: CheckpointInfo, engine: Engine, transports: tuple[str, ...]
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._engine = engine
        self._transports = transports
        self._incarnation = new_incarnation()
        self._receiver = _new_receiver(config, engine, transports, self._incarnation)
        self._worker = _new_worker(config, checkpoint, engine, self._receiver)
        servicer = WorkerServicer(self._worker, self._incarnation)
        register = partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer)
        service = Service(SERVICE_NAME, register, long_lived=True)
        self._server = RpcServer(config.listen, [service], max_receive_bytes=config.max_receive_bytes)

    async def run(self, stop: StopSignal) -> None:
        """Serves until a stop is asked for, then ends what was begun."""
        await self._receiver.start()
        try:
            port = await self._server.start()
            info = self._info(advertised_address(self._config.listen, self._config.advertise, port))
            await self._serve(info, stop)
        finally:
            await self._server.drain(grace_s=0)
            await self._receiver.stop()

    async def _serve(self, info: WorkerInfo, stop: StopSignal) -> None:
        announcer = Announcer(self._config.router, info, self._worker.load, self._refuse_new_work)
        async with asyncio.TaskGroup() as tasks:
            background = (
                tasks.create_task(self._worker.run(), name="step-loop"),
                tasks.create_task(announcer.run(), name="announcer"),
            )
            self._server.set_serving(True)
            print(f"ready {info.address}", flush=True)
            await stop.wait()
            await self._drain(announcer)
            for task in background:
                task.cancel()

    def _refuse_new_work(self) -> None:
        self._worker.drain()
        self._server.set_serving(False)

    async def _drain(self, announcer: Announcer) -> None:
        self._refuse_new_work()
        announcer.announce_now()
        try:
            await asyncio.wait_for(self._worker.drained(), self._config.drain_grace_s)
        except TimeoutError:
            _log.warning("sequences still held at the end of the drain", grace_s=self._config.drain_grace_s)

    def _info(self, address: str) -> WorkerInfo:
        return WorkerInfo(
            worker_id=WorkerId(self._config.worker_id or f"decode-{self._incarnation[:8]}"),
            incarnation=self._incarnation,
            role=Role.DECODE,
            address=address,
            model=self._checkpoint.name,
            config_fingerprint=self._checkpoint.config_fingerprint,
            model_fingerprint=self._engine.fingerprint,
            layout_fingerprint=self._engine.layout.fingerprint(),
            transports=self._transports,
            local_prefill_tokens=self._config.local_prefill_tokens,
            max_sequence_tokens=self._engine.max_sequence_tokens,
            pid=os.getpid(),
            device=str(self._engine.model.device),
        )


def transports_for(choice: str, device: torch.device) -> tuple[str, ...]:
    """Names of the transports to register, best first. Raises ConfigError if `choice` does not work here."""
    statuses = available(device)
    names = tuple(status.name for status in statuses if status.usable and choice in (AUTO, status.name))
    if not names:
        reasons = "; ".join(f"{status.name}: {status.reason}" for status in statuses if not status.usable)
        raise ConfigError("--transport", f"{choice} does not work with KV on {device}; {reasons}")
    return names


def _engine_options(config: DecodeConfig, checkpoint: CheckpointInfo, *, shared_kv: bool) -> EngineOptions:
    return EngineOptions(
        model_path=checkpoint.path,
        device=config.device,
        dtype=config.dtype,
        block_size=config.block_size,
        kv_blocks=config.kv_blocks,
        kv_memory_bytes=config.kv_memory_bytes,
        max_seqs=config.max_seqs,
        attention_backend=config.attention_backend,
        shared_kv=shared_kv,
        placement=ThreadPlacement(threads=config.threads),
    )


def _new_receiver(
    config: DecodeConfig, engine: Engine, transports: tuple[str, ...], incarnation: Incarnation
) -> KvReceiver:
    memory = PoolMemory(engine.kv_cache.blocks_view, engine.kv_cache.shared_fd, incarnation)
    fingerprints = Fingerprints(engine.fingerprint, engine.layout)
    # Senders reach the KV endpoint at the host where routers reach the worker.
    advertised = advertised_address(config.listen, config.advertise, 1)
    return KvReceiver(
        memory,
        fingerprints,
        MonotonicClock(),
        transports,
        listen_host=_host_of(config.listen),
        advertise_host=_host_of(advertised),
    )


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _new_worker(config: DecodeConfig, checkpoint: CheckpointInfo, engine: Engine, receiver: KvReceiver) -> DecodeWorker:
    validator = Validator(config.limits, checkpoint.vocab_size, checkpoint.context_tokens)
    parts = WorkerParts(engine.thread, engine.pool, receiver, validator, MonotonicClock())
    limits = StepLimits(config.block_size, config.max_seqs, config.chunk_tokens)
    return DecodeWorker(parts, WorkerPolicy(limits, engine.max_sequence_tokens))
