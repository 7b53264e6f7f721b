"""The prefill worker's composition root: builds the parts, serves, stops them in order.

    load engine → serve (NOT_SERVING) → register → `ready HOST:PORT` → SERVING
    SIGTERM     → NOT_SERVING, no new work → prompts and transfers end → streams end → exit 0

Knows every part and decides nothing about prompts (see `worker`).
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

import torch

from engine.loading import Engine, EngineOptions, load_engine
from engine.placement import ThreadPlacement
from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.sender import KvSender
from kvtransfer.transports import AUTO, available
from prefill_worker.handoff import HandoffPolicy
from prefill_worker.scheduler import BatchLimits
from prefill_worker.worker import PrefillWorker, WorkerParts
from tandem.checkpoint import CheckpointInfo, read_checkpoint
from tandem.clock import MonotonicClock
from tandem.config import PrefillConfig
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


def run(config: PrefillConfig) -> int:
    """Runs the process until it is told to stop; returns its exit code."""
    configure_logging("prefill", config.log_format, config.log_level)
    return run_process(partial(serve, config))


async def serve(config: PrefillConfig, stop: StopSignal) -> None:
    """Loads, serves and drains one worker. Raises ConfigError, CheckpointError."""
    checkpoint = read_checkpoint(config.model)
    engine = await asyncio.to_thread(load_engine, _engine_options(config, checkpoint))
    try:
        await PrefillProcess(config, checkpoint, engine).run(stop)
    finally:
        engine.close()


class PrefillProcess:
    """One life of a prefill worker around a loaded engine, which it does not close."""

    def __init__(self, config: PrefillConfig, checkpoint: CheckpointInfo, engine: Engine) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._engine = engine
        self._incarnation = new_incarnation()
        self._transports = transports_for(config.transport, engine.model.device)
        self._sender = _new_sender(config.transport, engine, self._incarnation)
        self._worker = _new_worker(config, checkpoint, engine, self._sender)
        servicer = WorkerServicer(self._worker, self._incarnation)
        register = partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer)
        service = Service(SERVICE_NAME, register, long_lived=True)
        self._server = RpcServer(config.listen, [service], max_receive_bytes=config.max_receive_bytes)

    async def run(self, stop: StopSignal) -> None:
        """Serves until a stop is asked for, then ends what was begun."""
        port = await self._server.start()
        info = self._info(advertised_address(self._config.listen, self._config.advertise, port))
        announcer = Announcer(self._config.router, info, self._worker.load, self._refuse_new_work)
        try:
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
        finally:
            await self._server.drain(grace_s=0)
            await self._sender.stop()

    def _refuse_new_work(self) -> None:
        self._worker.drain()
        self._server.set_serving(False)

    async def _drain(self, announcer: Announcer) -> None:
        self._refuse_new_work()
        announcer.announce_now()
        try:
            await asyncio.wait_for(self._worker.drained(), self._config.drain_grace_s)
        except TimeoutError:
            _log.warning("prompts still held at the end of the drain", grace_s=self._config.drain_grace_s)
        else:
            self._worker.check_idle()

    def _info(self, address: str) -> WorkerInfo:
        return WorkerInfo(
            worker_id=WorkerId(self._config.worker_id or f"prefill-{self._incarnation[:8]}"),
            incarnation=self._incarnation,
            role=Role.PREFILL,
            address=address,
            model=self._checkpoint.name,
            config_fingerprint=self._checkpoint.config_fingerprint,
            model_fingerprint=self._engine.fingerprint,
            layout_fingerprint=self._engine.layout.fingerprint(),
            transports=self._transports,
            local_prefill_tokens=0,
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


def _engine_options(config: PrefillConfig, checkpoint: CheckpointInfo) -> EngineOptions:
    return EngineOptions(
        model_path=checkpoint.path,
        device=config.device,
        dtype=config.dtype,
        block_size=config.block_size,
        kv_blocks=config.kv_blocks,
        kv_memory_bytes=config.kv_memory_bytes,
        max_seqs=config.max_seqs,
        attention_backend=config.attention_backend,
        placement=ThreadPlacement(threads=config.threads),
    )


def _new_sender(transport: str, engine: Engine, incarnation: Incarnation) -> KvSender:
    memory = PoolMemory(engine.kv_cache.blocks_view, engine.kv_cache.shared_fd, incarnation)
    return KvSender(memory, Fingerprints(engine.fingerprint, engine.layout), MonotonicClock(), transport)


def _new_worker(config: PrefillConfig, checkpoint: CheckpointInfo, engine: Engine, sender: KvSender) -> PrefillWorker:
    validator = Validator(config.limits, checkpoint.vocab_size, checkpoint.context_tokens)
    parts = WorkerParts(engine.thread, engine.pool, sender, validator, MonotonicClock())
    limits = BatchLimits(config.chunk_tokens, config.max_seqs)
    return PrefillWorker(parts, limits, HandoffPolicy(overlap=config.overlap), engine.max_sequence_tokens)
