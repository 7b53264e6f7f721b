"""Tandem's engine under `bench.peers`: `python -m bench.peers.tandem_engine MODEL_DIR THREADS [OPTIONS]`. No router."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.inprocess import run_batch
from bench.peers.job import Job, JobTimes, OpenedEngine, serve_jobs
from bench.support.machine import cpu_tier
from engine.loading import load_engine
from shell.config import WorkerConfig
from tandem import __version__

_KV_BLOCKS = 1536
"""Of 16 tokens: enough for the largest job, and few enough to be all in use, not fresh from the system, soon."""


def open_engine(model: Path, threads: int, **changes: Any) -> OpenedEngine:
    """Loads it with the kernels that it chooses by itself; `changes` are fields of WorkerConfig."""
    config = WorkerConfig(model=str(model), device="cpu", kv_blocks=_KV_BLOCKS, threads=threads)
    engine = load_engine(replace(config, **changes))
    vocab_size = engine.model.config.vocab_size

    def run(job: Job) -> JobTimes:
        prompts = job.prompts(vocab_size)
        budget = job.budget_tokens or job.num_seqs * job.prompt_tokens
        times = run_batch(engine, prompts, job.decode_steps + 1, budget)
        return JobTimes(times.first_token_s, list(times.step_s), [tokens[0] for tokens in times.token_ids])

    facts = {
        "tandem": __version__,
        "threads": str(threads),
        "attention": engine.backend_name,
        "tier": str(changes.get("cpu_tier", cpu_tier())),
        "block_size": str(engine.layout.block_size),
        "dtype": engine.layout.dtype.value,
    }
    return OpenedEngine(run, facts)


if __name__ == "__main__":
    serve_jobs(open_engine)
