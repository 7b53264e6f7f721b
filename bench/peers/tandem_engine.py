"""Tandem's engine under `bench.peers`: `python -m bench.peers.tandem_engine MODEL_DIR THREADS [OPTIONS]`. No router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.peers.job import Job, JobTimes, OpenedEngine, serve_jobs
from bench.support.machine import cpu_tier
from engine.chunking import plan_chunks
from engine.loading import Engine, load_engine
from engine.sequence import Sequence
from engine.step import BrokenLogits, Step
from shell.config import WorkerConfig
from tandem import __version__
from tandem.types import RequestId, SamplingParams, TokenId

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


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What one batch took."""

    first_token_s: float
    """From the call to the first token of the last prompt, all prompts in ragged steps of `chunk_tokens` at most."""
    step_s: tuple[float, ...]
    """Each decode step of the whole batch."""
    token_ids: tuple[tuple[TokenId, ...], ...]
    """The completions."""


def run_batch(engine: Engine, prompts: SequenceOf[SequenceOf[int]], max_tokens: int, chunk_tokens: int) -> EngineTimes:
    """Greedy, end-of-text ignored: computes every prompt, then decodes all of them together."""
    return asyncio.run(_run(engine, prompts, max_tokens, chunk_tokens))


async def _run(engine: Engine, prompts: SequenceOf[SequenceOf[int]], max_tokens: int, chunk_tokens: int) -> EngineTimes:
    seqs = [_sequence(number, prompt, max_tokens) for number, prompt in enumerate(prompts)]
    began_s = time.perf_counter()
    while waiting := [seq for seq in seqs if not seq.num_output_tokens]:
        chunks = plan_chunks([seq.num_remaining_tokens for seq in waiting], chunk_tokens, len(waiting))
        await _step(engine, [(seq, chunk) for seq, chunk in zip(waiting, chunks, strict=True) if chunk])
    first_token_s = time.perf_counter() - began_s
    step_s = []
    while not seqs[0].is_finished:
        began_s = time.perf_counter()
        await _step(engine, [(seq, 1) for seq in seqs])
        step_s.append(time.perf_counter() - began_s)
    for seq in seqs:
        engine.pool.release(seq.take_blocks())
    return EngineTimes(first_token_s, tuple(step_s), tuple(seq.output_token_ids for seq in seqs))


def _sequence(number: int, prompt: SequenceOf[int], max_tokens: int) -> Sequence:
    token_ids = tuple(TokenId(token_id) for token_id in prompt)
    return Sequence(number, SamplingParams(max_tokens=max_tokens, temperature=0.0), token_ids)


async def _step(engine: Engine, chunks: SequenceOf[tuple[Sequence, int]]) -> None:
    """One engine step that computes so many tokens of each seq."""
    for seq, num_tokens in chunks:
        wanted = seq.blocks_wanted(num_tokens, engine.pool.block_size)
        if wanted:
            seq.add_blocks(engine.pool.allocate(wanted))
    result = await engine.thread.launch(Step(tuple(seq.schedule(size) for seq, size in chunks)))
    for (seq, _), outputs in zip(chunks, result.outputs, strict=True):
        for sampled in outputs:
            if isinstance(sampled, BrokenLogits):
                raise sampled.error(RequestId(f"bench-{seq.index}"))
            seq.append_token(sampled[0].token_id)


if __name__ == "__main__":
    serve_jobs(open_engine)
