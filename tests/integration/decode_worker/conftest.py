"""A decode worker on a real engine and a tiny random Llama, driven without gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.support.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from decode_worker.worker import new_decode_worker
from engine.block_pool import BlockPool
from engine.guides import Guides
from engine.loading import Engine, EngineRole, load_engine
from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.transports import SHM, TCP
from shell.clock import MonotonicClock
from shell.config import DecodeConfig, WorkerConfig
from tandem.option_values import SizedFolder
from tandem.types import (
    ChoiceSpec,
    GroupSpec,
    Handle,
    RequestId,
    SamplingParams,
    TokenId,
    new_incarnation,
)
from tests.heard_router import HeardRouter
from tests.worker_parts import parts_of
from worker.core import Worker

WAIT_S = 60.0


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(TINY_MODELS[0], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def reference(tiny_llama: Path) -> Callable[[GroupSpec], list[TokenId]]:
    """Greedy completion by transformers' own `generate`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        tiny_llama, dtype=torch.float32, local_files_only=True
    )
    known: dict[tuple[TokenId, ...], list[TokenId]] = {}

    def generate(spec: GroupSpec) -> list[TokenId]:
        prompt = spec.prompt_token_ids
        if len(known.get(prompt, ())) < spec.sampling.max_tokens:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=spec.sampling.max_tokens,
            )
            known[prompt] = [TokenId(int(token)) for token in out[0, len(prompt) :]]
        return known[prompt][: spec.sampling.max_tokens]

    return generate


@pytest.fixture
def make_spec() -> Callable[..., GroupSpec]:
    def make(
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        n: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        timeout_s: float | None = None,
    ) -> GroupSpec:
        rng = random.Random(num_prompt_tokens)
        return GroupSpec(
            request_id=RequestId(f"r{num_prompt_tokens}"),
            prompt_token_ids=tuple(TokenId(rng.randrange(VOCAB_SIZE)) for _ in range(num_prompt_tokens)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
            choices=tuple(ChoiceSpec(index) for index in range(n)),
            timeout_s=timeout_s,
        )

    return make


@pytest.fixture
def load_tiny_engine(tiny_llama: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Loads engines and closes them after the test. Their KV is NaN wherever nothing was written."""
    engines: list[Engine] = []

    def load(
        block_size: int,
        num_blocks: int,
        *,
        shared_kv: bool = False,
        staged_kv: bool = False,
        prefix_cache: bool = True,
        host_cache_bytes: int = 0,
        disk_cache_bytes: int = 0,
    ) -> Engine:
        config = WorkerConfig(
            model=str(tiny_llama),
            device="cpu",
            dtype="float32",
            block_size=block_size,
            kv_blocks=num_blocks,
            attention_backend="reference",
            prefix_cache=prefix_cache,
            host_cache_bytes=host_cache_bytes,
            disk_cache=SizedFolder(str(tmp_path), disk_cache_bytes) if disk_cache_bytes else None,
            threads=1,
        )
        engines.append(load_engine(config, EngineRole(shared_kv=shared_kv, staged_kv=staged_kv)))
        engines[-1].kv_cache.fill_poison()
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


@dataclass(eq=False)
class Router(HeardRouter):
    """Hears of a prompt before its first tokens, and sees how many blocks are in use."""

    pool: BlockPool = field(kw_only=True)
    most_live_blocks: int = 0
    """Of the decode worker's pool, whenever a token came."""

    def token(self, handle: Handle, *args: Any) -> None:
        assert handle in self.cached_tokens, "told before the first tokens"
        super().token(handle, *args)
        self.most_live_blocks = max(self.most_live_blocks, self.pool.counts().live)


@dataclass
class Bench:
    """A running worker, its engine and its router."""

    worker: Worker
    engine: Engine
    router: Router
    num_handles: int = 0

    def reserve(
        self, spec: GroupSpec, *, local_prefill: bool = True, first_offsets: Sequence[int] | None = None
    ) -> Handle:
        """With a handle of its own. `first_offsets`: of each choice's first token here."""
        handle = self.new_handle(spec)
        for index, offset in enumerate(first_offsets or ()):
            self.router.first_offsets[handle, index] = offset
        self.worker.reserve(self.router, handle, spec, local_prefill)
        return handle

    def new_handle(self, spec: GroupSpec) -> Handle:
        """The router waits for its choices from now on."""
        handle = Handle(self.num_handles)
        self.num_handles += 1
        self.router.num_choices[handle] = len(spec.choices)
        self.router.first_offsets |= {(handle, choice.index): 0 for choice in spec.choices}
        return handle

    async def finish(self, handles: Collection[Handle]) -> None:
        """Waits until all of them have finished."""
        await self.router.until(lambda: self.router.errors or set(handles) <= self.router.ended)
        assert not self.router.errors

    async def complete(self, specs: Sequence[GroupSpec]) -> list[list[list[TokenId]]]:
        """Serves them all at once, prompts computed here; returns the choices of each."""
        handles = [self.reserve(spec) for spec in specs]
        await self.finish(handles)
        return [self.router.completions(handle) for handle in handles]


@pytest.fixture
def open_bench(load_tiny_engine: Callable[..., Engine]) -> Callable[..., object]:
    """`async with open_bench(...) as bench`: the pool must be idle at the end."""

    @asynccontextmanager
    async def opened(
        block_size: int = 16,
        num_blocks: int = 64,
        max_seqs: int = 16,
        chunk_tokens: int = 64,
        *,
        staged_kv: bool = False,
        overlap_steps: bool = True,
        is_asynchronous: bool = False,
        prefix_cache: bool = True,
        host_cache_bytes: int = 0,
        disk_cache_bytes: int = 0,
        guides: Guides | None = None,
    ) -> AsyncIterator[Bench]:
        engine = load_tiny_engine(
            block_size,
            num_blocks,
            shared_kv=True,
            staged_kv=staged_kv,
            prefix_cache=prefix_cache,
            host_cache_bytes=host_cache_bytes,
            disk_cache_bytes=disk_cache_bytes,
        )
        engine.thread.is_asynchronous = is_asynchronous
        memory = PoolMemory(
            engine.kv_cache.host_rows, engine.kv_cache.shared_fd, new_incarnation(), engine.kv_cache.staging
        )
        prints = Fingerprints(engine.model.fingerprint, engine.layout)
        receiver = KvReceiver(memory, prints, MonotonicClock(), (SHM, TCP), "127.0.0.1")
        max_tokens = engine.sizes.max_sequence_tokens
        parts = parts_of(
            engine.thread,
            engine.cache,
            max_seqs=max_seqs,
            chunk_tokens=chunk_tokens,
            max_tokens=max_tokens,
            vocab_size=VOCAB_SIZE,
            guides=guides,
        )
        config = DecodeConfig(overlap_steps="auto" if overlap_steps else "off")
        worker = new_decode_worker(parts, receiver, config, first_guess_tokens=8)  # so low that small pools preempt
        await receiver.start()
        running = asyncio.create_task(worker.run())
        try:
            yield Bench(worker, engine, Router(pool=engine.pool))
            async with asyncio.timeout(WAIT_S):
                await worker.drained()
            worker.check_idle()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await receiver.stop()

    return opened
