"""The decode worker's composition root: builds the parts, serves, closes them in order.

    load engine → listen for KV → serve and register (`worker.serving.process`) → receiver, sender stop → engine closes

Knows every part and decides nothing about requests (see `worker`).
"""

from __future__ import annotations

from dataclasses import replace

from opentelemetry.trace import Tracer

from decode_worker.policy import WorkerPolicy
from decode_worker.scheduler import StepLimits
from decode_worker.worker import new_decode_worker
from engine.graphs import MAX_CAPTURED_SEQS
from engine.guides import Guides
from engine.loading import Engine, EngineRole
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
    engine_role = EngineRole(
        shared_kv=SHM in base.transports,
        device_shared_kv=CUDA_IPC in base.transports,
        graph_seqs=MAX_CAPTURED_SEQS if config.cuda_graph_seqs is None else config.cuda_graph_seqs,
    )
    async with base.engine(engine_role, stop) as engine:
        info = replace(
            base.info(engine),
            local_prefill_tokens=announced_local_tokens(config),
            # One ticket must be able to name all blocks of a sequence.
            max_sequence_tokens=min(engine.max_sequence_tokens, MAX_BLOCKS * engine.layout.block_size),
            pool_tokens=engine.pool.num_blocks * engine.layout.block_size,
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
        policy = _policy(config, engine, info.max_sequence_tokens)
        worker = new_decode_worker(base.parts(engine, guides), receiver, policy, sender)
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


def _policy(config: DecodeConfig, engine: Engine, max_sequence_tokens: int) -> WorkerPolicy:
    objective_s = config.inter_token_objective_s
    if objective_s is None and not config.elastic:
        objective_s = 0.0  # by itself it computes most in whole chunks: 225 tokens/s against 134 (bench/LOG.md)
    return WorkerPolicy(
        StepLimits(config.block_size, engine.max_seqs, engine.chunk_tokens.beside),
        max_sequence_tokens,
        overlap_steps=config.overlap_steps == "auto",
        inter_token_objective_s=objective_s,
        waiting_served_ratio=config.waiting_served_ratio,
        alone_tokens=engine.chunk_tokens.alone,
        elastic=config.elastic,
    )


def _role(config: DecodeConfig) -> Role:
    return Role.ELASTIC if config.elastic else Role.DECODE


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
