"""A decode worker on a real engine and a tiny random Llama, driven without gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.tiny_models import CONTEXT_TOKENS, TINY_MODELS, VOCAB_SIZE, save_tiny_model
from decode_worker.scheduler import StepLimits
from decode_worker.worker import DecodeWorker, WorkerParts, WorkerPolicy
from engine.loading import Engine, EngineOptions, load_engine
from engine.placement import ThreadPlacement
from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.transports import SHM, TCP
from tandem.clock import MonotonicClock
from tandem.errors import TandemError
from tandem.incarnation import new_incarnation
from tandem.limits import Limits
from tandem.types import Handle, RequestId, SamplingParams, SequenceSpec, TokenDelta, TokenId
from tandem.validation import Validator

WAIT_S = 60.0


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(TINY_MODELS[0], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def reference(tiny_llama: Path) -> Callable[[SequenceSpec], list[TokenId]]:
    """Greedy completion by transformers' own `generate`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        tiny_llama, dtype=torch.float32, local_files_only=True
    )
    known: dict[tuple[TokenId, ...], list[TokenId]] = {}

    def generate(spec: SequenceSpec) -> list[TokenId]:
        prompt = spec.token_ids[: spec.num_prompt_tokens]
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
def make_spec() -> Callable[..., SequenceSpec]:
    def make(num_prompt_tokens: int, max_tokens: int, timeout_s: float | None = None) -> SequenceSpec:
        rng = random.Random(num_prompt_tokens)
        return SequenceSpec(
            request_id=RequestId(f"r{num_prompt_tokens}"),
            token_ids=tuple(TokenId(rng.randrange(VOCAB_SIZE)) for _ in range(num_prompt_tokens)),
            num_prompt_tokens=num_prompt_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            timeout_s=timeout_s,
        )

    return make


@pytest.fixture
def load_tiny_engine(tiny_llama: Path) -> Iterator[Callable[..., Engine]]:
    """Loads engines and closes them after the test. Their KV is NaN wherever nothing was written."""
    engines: list[Engine] = []

    def load(block_size: int, num_blocks: int, *, shared_kv: bool = False, mirrored_kv: bool = False) -> Engine:
        options = EngineOptions(
            model_path=tiny_llama,
            device="cpu",
            dtype="float32",
            block_size=block_size,
            kv_blocks=num_blocks,
            attention_backend="reference",
            shared_kv=shared_kv,
            mirrored_kv=mirrored_kv,
            placement=ThreadPlacement(threads=1),
        )
        engines.append(load_engine(options))
        engines[-1].kv_cache.fill_poison()
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


@dataclass(eq=False)
class Router:
    """Collects what the worker says."""

    tickets: dict[Handle, tuple[bytes, bytes]] = field(default_factory=dict)
    tokens: dict[Handle, list[TokenId]] = field(default_factory=dict)
    ended: set[Handle] = field(default_factory=set)
    errors: dict[Handle, TandemError] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def reserved(self, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        self.tickets[handle] = (ticket, kv_endpoint)
        self._news.set()

    def prefill_done(self, handle: Handle, delta: TokenDelta, queue_s: float, prefill_s: float) -> None:
        self._take(handle, delta)

    def deltas(self, deltas: Iterable[tuple[Handle, TokenDelta]]) -> None:
        for handle, delta in deltas:
            self._take(handle, delta)

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None: ...

    def failed(self, handle: Handle, error: TandemError) -> None:
        self.errors[handle] = error
        self._news.set()

    def _take(self, handle: Handle, delta: TokenDelta) -> None:
        tokens = self.tokens.setdefault(handle, [])
        assert delta.offset == len(tokens), "a token was lost or repeated"
        tokens.extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.ended.add(handle)
        self._news.set()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._news.clear()
                await self._news.wait()


@dataclass
class Bench:
    """A running worker, its engine and its router."""

    worker: DecodeWorker
    engine: Engine
    router: Router

    async def complete(self, specs: Sequence[SequenceSpec]) -> list[list[TokenId]]:
        """Serves them all at once, prompts computed here."""
        handles = [Handle(number) for number in range(len(specs))]
        for handle, spec in zip(handles, specs, strict=True):
            self.worker.reserve(self.router, handle, spec, True)
        await self.router.until(lambda: self.router.errors or set(handles) <= self.router.ended)
        assert not self.router.errors
        return [self.router.tokens[handle] for handle in handles]


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
        mirrored_kv: bool = False,
    ) -> AsyncIterator[Bench]:
        engine = load_tiny_engine(block_size, num_blocks, shared_kv=True, mirrored_kv=mirrored_kv)
        memory = PoolMemory(
            engine.kv_cache.host_blocks, engine.kv_cache.shared_fd, new_incarnation(), engine.kv_cache.mirror
        )
        prints = Fingerprints(engine.fingerprint, engine.layout)
        receiver = KvReceiver(memory, prints, MonotonicClock(), (SHM, TCP), "127.0.0.1")
        validator = Validator(Limits(), VOCAB_SIZE, CONTEXT_TOKENS)
        worker = DecodeWorker(
            WorkerParts(engine.thread, engine.pool, receiver, validator, MonotonicClock()),
            WorkerPolicy(StepLimits(block_size, max_seqs, chunk_tokens), engine.max_sequence_tokens),
        )
        await receiver.start()
        running = asyncio.create_task(worker.run())
        try:
            yield Bench(worker, engine, Router())
            async with asyncio.timeout(WAIT_S):
                await worker.drained()
            worker.check_idle()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await receiver.stop()

    return opened
