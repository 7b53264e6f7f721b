"""The prefill worker's composition root: builds the parts, serves, closes them in order.

    load engine → serve and register (`worker.serving.process`) → sender stops → engine closes

Knows every part and decides nothing about prompts (see `worker`).
"""

from __future__ import annotations

from opentelemetry.trace import Tracer

from engine.guides import Guides
from engine.loading import EngineRole
from models.grammar import GrammarCompiler
from prefill_worker.prompts import new_prefill_worker
from shell.config import PrefillConfig
from shell.rpc.process import StopSignal
from tandem.types import Role
from worker.serving.app import Foundation, run_worker


def run(config: PrefillConfig) -> int:
    """Runs the process until a stop is asked for; returns its exit code."""
    return run_worker(Role.PREFILL, config, serve)


async def serve(config: PrefillConfig, tracer: Tracer | None, stop: StopSignal) -> None:
    """Loads, serves and drains a worker. Raises ConfigError, CheckpointError."""
    base = Foundation.lay(Role.PREFILL, config, tracer)
    async with base.engine(EngineRole(prefills_only=True), stop) as engine:
        sender, guides = base.sender(engine), Guides(GrammarCompiler.of(base.checkpoint))
        try:
            worker = new_prefill_worker(base.parts(engine, guides), sender)
            await base.serve(worker, base.info(engine), stop, engine.cache)
        finally:
            guides.close()
            await sender.stop()
