"""What is checked for exactness: anything that continues prompts greedily.

`ENGINE_SYSTEMS` runs the engine in this process; `exactness_served` has the served ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.block_pool import BlockPool
from engine.chunking import plan_chunks
from engine.kv_cache import KvCache
from engine.runner import Runner
from engine.sequence import Sequence as Seq
from engine.step import BrokenLogits, Step
from kernels.dispatch import AUTO, select_kernels
from models.loading import load_model
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
