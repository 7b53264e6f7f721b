"""Whether a system continues prompts, on and beside every block and chunk border, as transformers does.

A system is anything that continues prompts greedily: the engine in this process (`ENGINE_SYSTEMS`), or real processes
on one transport or colocated (`SERVED_SYSTEMS`).
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from bench.support.cluster import serve
from bench.support.reference import Reference
from engine.block_pool import BlockPool
from engine.chunking import plan_chunks
from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.sequence import Sequence as Seq
from engine.step import BrokenLogits, Step
from kernels.dispatch import AUTO, select_kernels
from kvtransfer.transports import TRANSPORTS, available_between
from models.files.checkpoint import read_checkpoint
from models.loading import load_model
from tandem.client import AsyncClient
from tandem.types import RequestId, SamplingParams, TokenId

MAX_SEQS = 16
AUTO_IMPL = "auto"


@dataclass(frozen=True, slots=True)
class Settings:
    """What must not change a single token."""

    block_size: int
    chunk_tokens: int
    """Prefill budget of one step."""
    device: str = "cpu"
    """Where served systems compute; the engine alone does so on the CPU."""
    model_impl: str = AUTO_IMPL
    """Whose forward pass: `tandem serve --model-impl`."""


class System(Protocol):
    """The system under test, in float32."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt, all prompts given at once, end-of-text ignored."""
        ...


class EngineSystem:
    """The engine in this process: chunks and decode steps share batches, seqs leave as they end."""

    def __init__(self, runner: Runner, pool: BlockPool, chunk_tokens: int) -> None:
        self._runner = runner
        self._pool = pool
        self._chunk_tokens = chunk_tokens

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """See `System.generate`."""
        seqs = [_make_seq(number, prompt, max_tokens) for number, prompt in enumerate(prompts)]
        running = list(seqs)
        while running:
            self._step(running)
            for seq in running:
                if seq.is_finished:
                    self._pool.release(tuple(seq.take_blocks()))
            running = [seq for seq in running if not seq.is_finished]
        self._pool.assert_idle()
        return [[int(token_id) for token_id in seq.output_token_ids] for seq in seqs]

    def _step(self, running: list[Seq]) -> None:
        remaining = [seq.num_remaining_tokens for seq in running]
        work = [
            pair for pair in zip(running, plan_chunks(remaining, self._chunk_tokens, MAX_SEQS), strict=True) if pair[1]
        ]
        for seq, num_tokens in work:
            seq.add_blocks(self._pool.allocate(seq.blocks_wanted(num_tokens, self._pool.block_size)))
        result = self._runner.run(Step(tuple(seq.schedule(num_tokens) for seq, num_tokens in work)))
        for (seq, _), outputs in zip(work, result.outputs, strict=True):
            for sampled in outputs:
                if isinstance(sampled, BrokenLogits):
                    raise sampled.error(RequestId(f"exactness-{seq.index}"))
                seq.append_token(sampled[0].token_id)


def _make_seq(number: int, prompt: Sequence[int], max_tokens: int) -> Seq:
    token_ids = tuple(TokenId(token_id) for token_id in prompt)
    return Seq(number, SamplingParams(max_tokens=max_tokens, temperature=0.0), token_ids)


@contextmanager
def open_engine(folder: Path, settings: Settings) -> Iterator[System]:
    """The engine alone: no worker, no hand-off. Its pool starts poisoned, so that a stray read shows."""
    device = torch.device("cpu")
    kernels = select_kernels(AUTO, device, torch.float32)
    model = load_model(folder, "float32", device, kernels, implementation=settings.model_impl)
    layout = model.kv_layout(settings.block_size)
    num_blocks = MAX_SEQS * layout.blocks_for(min(model.config.context_tokens, 4096))
    kv_cache = KvCache.create(layout, num_blocks, device)
    try:
        kv_cache.fill_poison()
        pool = BlockPool(num_blocks, settings.block_size)
        yield EngineSystem(Runner(model.decoder, kv_cache, kernels), pool, settings.chunk_tokens)
    finally:
        kv_cache.close()


ENGINE_SYSTEMS: dict[str, Callable[[Path, Settings], AbstractContextManager[System]]] = {"engine": open_engine}


POOL_TOKENS = 4096 * MAX_SEQS
"""Room for every prompt of a batch, so that nothing is preempted; preemption has its own tests."""


class ServedSystem:
    """Every prompt as a request of its own, all at once, through gRPC."""

    def __init__(self, target: str) -> None:
        self._target = target

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """See `System.generate`."""
        return asyncio.run(self._generate(prompts, max_tokens))

    async def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        async with AsyncClient(self._target) as client:
            await client.wait_ready(timeout_s=60)
            done = await asyncio.gather(
                *(
                    client.complete(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
                    for prompt in prompts
                )
            )
        return [[int(token_id) for token_id in completion.choices[0].token_ids] for completion in done]


@contextmanager
def _open(folder: Path, settings: Settings, roles: tuple[str, ...]) -> Iterator[System]:
    options = (
        *("--dtype", "float32", "--block-size", str(settings.block_size)),
        *("--chunk-tokens", str(settings.chunk_tokens), "--max-seqs", str(MAX_SEQS)),
        *("--kv-blocks", str(POOL_TOKENS // settings.block_size), "--device", settings.device),
        *("--model-impl", settings.model_impl),
    )
    with serve(str(folder), *roles, *options) as cluster:
        yield ServedSystem(cluster.target)


def _disaggregated(transport: str) -> Callable[[Path, Settings], AbstractContextManager[System]]:
    return functools.partial(_open, roles=("--prefill", "1", "--decode", "1", "--transport", transport))


SERVED_SYSTEMS: dict[str, Callable[[Path, Settings], AbstractContextManager[System]]] = {
    **{transport.name: _disaggregated(transport.name) for transport in TRANSPORTS},
    "colocated": functools.partial(
        _open, roles=("--prefill", "0", "--decode", "1", "--local-prefill-tokens", "unlimited")
    ),
}


def served_on(device: str) -> list[str]:
    """The names of those that work with two workers' pools on `device`."""
    statuses = available_between(device, torch.cuda.device_count())
    unusable = {status.name for status in statuses if not status.usable}
    return [name for name in SERVED_SYSTEMS if name not in unusable]


SYSTEMS = {**ENGINE_SYSTEMS, **SERVED_SYSTEMS}
BLOCK_SIZES = (1, 16, 64)
CHUNK_BUDGETS = (64, 512)
MAX_TOKENS = 64
TOGETHER = 16
"""Prompts given to the system at once."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and the completions that transformers gives them."""

    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[list[int], ...]
    max_tokens: int


def border_lengths(longest: int) -> list[int]:
    """Prompt lengths on and beside the borders of blocks and chunks, and the ends of the range."""
    borders = {multiple * size for size in (*BLOCK_SIZES[1:], *CHUNK_BUDGETS) for multiple in (1, 2, 3)}
    borders |= {1, 2048, longest}
    lengths = {border + beside for border in borders for beside in (-1, 0, 1)}
    return sorted(length for length in lengths if 1 <= length <= longest)


def make_workload(
    folder: Path, reference: Reference, longest: int, seed: int, max_tokens: int = MAX_TOKENS
) -> Workload:
    """Random prompts of every border length that the model's context admits."""
    config = read_checkpoint(str(folder))
    rng = random.Random(seed)
    lengths = border_lengths(min(longest, config.context_tokens - max_tokens))
    rng.shuffle(lengths)  # so that each batch mixes long and short
    prompts = tuple(tuple(rng.randrange(config.vocab_size) for _ in range(length)) for length in lengths)
    return Workload(prompts, tuple(reference.generate(prompt, max_tokens) for prompt in prompts), max_tokens)


def check_system(name: str, folder: Path, settings: Settings, work: Workload) -> list[tuple[int, int]]:
    """Runs the workload; returns (prompt number, first wrong token) of each completion that differs."""
    completions: list[list[int]] = []
    with SYSTEMS[name](folder, settings) as system:
        for start in range(0, len(work.prompts), TOGETHER):
            completions += system.generate(work.prompts[start : start + TOGETHER], work.max_tokens)
    differing = []
    for number, (ours, theirs) in enumerate(zip(completions, work.expected, strict=True)):
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            differing.append((number, next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))))
    return differing
