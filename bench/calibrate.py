"""Fits the simulator's cost model to steps of an engine on this machine. Used by `bench.simulate`."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch
import uvloop

from bench.peers.servers import DISAGGREGATED, TANDEM_SERVERS, Server, tandem_turns, warm_up
from bench.support.step_timer import StepTimer
from bench.support.streams import Stream, StreamClient, fresh_prompts
from engine.chunking import ChunkTokens
from engine.loading import keep_freed_memory
from engine.step import Step
from kernels.dispatch import AUTO, select_kernels
from models.loading import LoadedModel, load_model
from shell.cores import usable_cores
from simulator.costs import CostModel, Fit, Sharing, StepWork, fit

_SEQS = (1, 4, 8, 16)
_CONTEXTS = (128, 1024)
_CHUNKS = (4, 16, 32, 64, 256, 512)
_BEFORE = (0, 1024)
_MIXED = ((1, 4), (1, 8), (2, 16), (1, 32), (4, 8), (4, 16), (4, 64), (8, 8), (8, 128), (8, 512))
"""(sequences that decode, prompt tokens beside them)"""
_CONTEXT_OF_MIXED = 300
_REPEATS = 3
_SHARED_PROMPTS, _SHARED_PROMPT_TOKENS = 6, 512
_SHARED_STREAMS, _SHARED_CONTEXT, _SHARED_TOKENS = 4, 64, 400
"""Streams last longer than the prompts beside them."""
BLOCK_SIZE = 16


def calibrate(model: Path, threads: int, device: str = "cpu") -> tuple[CostModel, Fit]:
    """Times decode steps, chunks of prompts, and both together; then how much two served workers slow each other.

    The latter on a CPU with cores for two, each with cores of its own that it lends to the other: steps are those of a
    worker alone, which has the cores of all. Takes about 45 s for 135M on two cores.
    """
    cores = usable_cores()
    has_room = device == "cpu" and len(cores) >= 2 * threads
    workers_per_host = len(cores) // threads if has_room else 1
    with _bound(cores[: workers_per_host * threads] if has_room else cores):
        loaded, timer, chunk_tokens = _timer(model, workers_per_host * threads, device)
        try:
            samples = [(StepWork.of(step), timer.median_s(step, _REPEATS)) for step in _steps(timer)]
        finally:
            timer.close()
    sharing = Sharing()
    if has_room:
        with _bound(cores[: 2 * threads]):
            sharing = _sharing(model, loaded.config.vocab_size)
    fitted = fit(samples)
    layout = loaded.kv_layout(BLOCK_SIZE)
    costs = CostModel(
        fitted.costs,
        sharing=sharing,
        workers_per_host=workers_per_host,
        threads=threads,
        block_size=BLOCK_SIZE,
        chunk_tokens=chunk_tokens.beside,
        prefill_chunk_tokens=chunk_tokens.alone,
        kv_bytes_per_token=layout.block_bytes // BLOCK_SIZE,
        source=f"steps measured here, {threads} thread(s) on {device}"
        f"{'' if device == 'cpu' else ', without CUDA graphs'}; they differ by {fitted.median_error:.0%} (median); "
        "pool, seats, hand-offs and messages are assumed",
    )
    return costs, fitted


def _timer(model: Path, threads: int, device: str) -> tuple[LoadedModel, StepTimer, ChunkTokens]:
    """And what workers there have by default."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    target = torch.device(device)
    kernels = select_kernels(AUTO, target, torch.bfloat16)
    loaded = load_model(model, "bfloat16", target, kernels)
    timer = StepTimer(loaded, BLOCK_SIZE, _SEQS[-1] * (_CONTEXTS[-1] + BLOCK_SIZE), kernels)
    return loaded, timer, ChunkTokens.of(0, target, kernels.full_tokens)


def _steps(timer: StepTimer) -> list[Step]:
    steps = [timer.step(seqs, context, 1) for seqs, context in product(_SEQS, _CONTEXTS)]
    steps += [timer.step(1, before, chunk) for chunk, before in product(_CHUNKS, _BEFORE)]
    for seqs, chunk in _MIXED:
        parts = timer.step(seqs, _CONTEXT_OF_MIXED, 1), timer.step(1, 0, chunk)
        steps.append(Step((*parts[0].chunks, *parts[1].chunks)))
    return steps


def _sharing(model: Path, vocab_size: int) -> Sharing:
    """How much a prefill and a decode worker of `tandem serve` slow each other: everything that serving does, too."""
    return uvloop.run(_served_sharing(model, vocab_size))


async def _served_sharing(model: Path, vocab_size: int) -> Sharing:
    async with tandem_turns(model, Server(TANDEM_SERVERS[DISAGGREGATED])) as turn, turn() as client:
        await warm_up(client, vocab_size)
        return await measure_sharing(client, vocab_size)


async def measure_sharing(client: StreamClient, vocab_size: int) -> Sharing:
    """Of a server with one prefill and one decode worker: prompts alone, streams alone, then both at once."""
    rng = random.Random(0)

    async def prompts() -> list[Stream]:
        """One after the other; their second tokens are no matter."""
        texts = fresh_prompts(rng, _SHARED_PROMPTS, _SHARED_PROMPT_TOKENS, vocab_size)
        return [await client.generate(text, 1) for text in texts]

    async def streams() -> list[asyncio.Task[Stream]]:
        """That have all begun to decode."""
        begun = asyncio.Semaphore(0)
        texts = fresh_prompts(rng, _SHARED_STREAMS, _SHARED_CONTEXT, vocab_size)
        tasks = [asyncio.create_task(client.generate(text, _SHARED_TOKENS, begun.release)) for text in texts]
        for _ in tasks:
            await begun.acquire()
        return tasks

    prompts_alone = await prompts()
    streams_alone = await asyncio.gather(*await streams())
    running = await streams()
    prompts_beside = await prompts()
    streams_beside = await asyncio.gather(*running)
    return sharing_of(prompts_alone, prompts_beside, streams_alone, streams_beside)


def sharing_of(
    prompts_alone: Sequence[Stream],
    prompts_beside: Sequence[Stream],
    streams_alone: Sequence[Stream],
    streams_beside: Sequence[Stream],
) -> Sharing:
    """By medians; of the gaps, those within the time in which the other kind was under way. At least 1."""
    begin_s = max(each.sent_s + each.ttft_s for each in streams_beside)
    end_s = min(each.end_s for each in streams_beside)
    among = [each for each in prompts_beside if begin_s <= each.sent_s and each.end_s <= end_s]
    if not among:
        raise RuntimeError("no prompt was computed while all streams ran")
    alone_from_s = max(each.sent_s + each.ttft_s for each in streams_alone)
    gaps_s = [gap for each in streams_alone for gap in each.gaps_s(alone_from_s)]
    gaps_beside_s = [gap for each in streams_beside for gap in each.gaps_s(among[0].sent_s, among[-1].end_s)]
    return Sharing(
        decode=max(1.0, statistics.median(gaps_beside_s) / statistics.median(gaps_s)),
        prompt=max(
            1.0,
            statistics.median(each.ttft_s for each in among) / statistics.median(each.ttft_s for each in prompts_alone),
        ),
    )


@contextmanager
def _bound(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and those that it starts, run on `cores` only."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
