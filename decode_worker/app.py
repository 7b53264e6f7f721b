"""The decode worker's composition root: builds the parts, serves, closes them in order.

    load engine → listen for KV → serve and register (`worker.serving.process`) → receiver, sender stop → engine closes

Knows every part and decides nothing about requests (see `worker`).
"""

from __future__ import annotations

from dataclasses import replace

from opentelemetry.trace import Tracer

from decode_worker.worker import new_decode_worker, objective
from engine.guides import Guides
from engine.loading import EngineRole
from kvtransfer.receiver import KvReceiver
from kvtransfer.ticket import MAX_BLOCKS
from kvtransfer.transports import CUDA_IPC, SHM
from models.grammar import GrammarCompiler
from shell.config import DecodeConfig
from shell.rpc.address import advertised_address
from shell.rpc.process import StopSignal
from tandem.types import Role
from worker.serving.app import Foundation, run_worker

MAX_LOCAL_TOKENS = 2**31 - 1
"""Longer than any prompt."""


def run(config: DecodeConfig) -> int:
    """Runs the process until a stop is asked for; returns its exit code."""
    return run_worker(_role(config), config, serve)


async def serve(config: DecodeConfig, tracer: Tracer | None, stop: StopSignal) -> None:
    """Loads, serves and drains a worker. Raises ConfigError, CheckpointError."""
    base = Foundation.lay(_role(config), config, tracer)
    engine_role = EngineRole(shared_kv=SHM in base.transports, device_shared_kv=CUDA_IPC in base.transports)
    async with base.engine(engine_role, stop) as engine:
        block_size = engine.layout.block_size
        # One ticket must be able to name all blocks of a sequence.
        max_tokens = min(engine.sizes.max_sequence_tokens, MAX_BLOCKS * block_size)
        info = base.info(engine)
        info = replace(
            info,
            decisions=(*info.decisions, objective(config)[1]),
            local_prefill_tokens=announced_local_tokens(config),
            max_sequence_tokens=max_tokens,
            pool_tokens=engine.pool.num_blocks * block_size,
        )
        receiver = KvReceiver(
            base.pool_memory(engine),
            base.fingerprints(engine),
            base.clock,
            base.transports,
            listen_host=_host_of(config.listen),
            listen_port=config.kv_port,
            # Senders reach the KV endpoint at the host where routers reach the worker.
            advertise_host=_host_of(advertised_address(config.listen, config.advertise, 1)),
            tls=base.security.incoming.tls,
        )
        sender, guides = base.sender(engine), Guides(GrammarCompiler.of(base.checkpoint))
        parts = base.parts(engine, guides)
        parts = replace(parts, sizes=replace(parts.sizes, max_sequence_tokens=max_tokens))
        worker = new_decode_worker(parts, receiver, config, sender)
        await receiver.start()
        try:
            await base.serve(worker, info, stop, engine.cache)
        finally:
            guides.close()
            await sender.stop()
            await receiver.stop()


def announced_local_tokens(config: DecodeConfig) -> int | None:
    """Longest prompt that routers are to leave here; None: on a decode worker any, on an elastic one as they find."""
    if not config.elastic:
        return config.local_prefill_tokens
    if config.local_prefill_tokens is None:
        return MAX_LOCAL_TOKENS
    return config.local_prefill_tokens or None  # 0 is the default


def _role(config: DecodeConfig) -> Role:
    return Role.ELASTIC if config.elastic else Role.DECODE


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
