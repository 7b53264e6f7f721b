"""The prefill worker's composition root: builds the parts, serves, closes them in order.

    load engine → serve and register (`worker.serving.process`) → sender stops → engine closes

Knows every part and decides nothing about prompts (see `worker`).
"""

from __future__ import annotations

from opentelemetry.trace import Tracer

from engine.guides import Guides
from engine.loading import EngineRole
from kvtransfer.sender import KvSender
from models.grammar import GrammarCompiler
from prefill_worker.scheduler import BatchLimits
from prefill_worker.worker import PrefillWorker, WorkerParts
from shell.config import PrefillConfig
from shell.rpc.process import StopSignal
from tandem.types import Role
from worker.outgoing_transfer import OutgoingPolicy
from worker.serving.app import Foundation, run_worker


def run(config: PrefillConfig) -> int:
    """Runs the process until it is told to stop; returns its exit code."""
    return run_worker(Role.PREFILL, config, serve)


async def serve(config: PrefillConfig, tracer: Tracer | None, stop: StopSignal) -> None:
    """Loads, serves and drains one worker. Raises ConfigError, CheckpointError."""
    base = Foundation.lay(Role.PREFILL, config, tracer)
    async with base.engine(EngineRole(prefills_only=True), stop) as engine:
        sender = KvSender(
            base.pool_memory(engine),
            base.fingerprints(engine),
            base.clock,
            config.transport,
            tls=base.security.outgoing.tls,
        )
        guides = Guides(GrammarCompiler.of(base.checkpoint))
        parts = WorkerParts(engine.thread, engine.cache, sender, base.validator, base.clock, base.observer, guides)
        limits = BatchLimits(engine.chunk_tokens.alone, engine.max_seqs)
        try:
            worker = PrefillWorker(parts, limits, OutgoingPolicy(), engine.max_sequence_tokens)
            await base.serve(worker, base.info(engine), stop, engine.cache)
        finally:
            guides.close()
            await sender.stop()
