"""The prefill worker with a real engine pushing into a real receiver, over shm and tcp."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from bench.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from engine.block_pool import BlockPool
from engine.kv_cache import KvCache
from engine.loading import Engine, EngineOptions, load_engine
from engine.placement import ThreadPlacement
from engine.runner import Runner
from engine.sequence import Sequence
from engine.step import SampledToken, ScheduledSeq
from kvtransfer.base import BlockRef, Fingerprints, Offer, PoolMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from prefill_worker.handoff import HandoffPolicy
from prefill_worker.scheduler import BatchLimits
from prefill_worker.worker import PrefillWorker, WorkerParts
from tandem.clock import MonotonicClock
from tandem.errors import TandemError, TransferError
from tandem.first_token import decode_first_token
from tandem.incarnation import new_incarnation
from tandem.kv_layout import KvLayout
from tandem.lifecycle import BlockState
from tandem.limits import Limits
from tandem.types import BlockId, Handle, RequestId, SamplingParams, SequenceSpec, TokenDelta, TokenId
from tandem.validation import Validator

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, CHUNK_TOKENS = 16, 128, 64
DEADLINE_S = 20.0


class Arrivals:
    """What has been said so far, with a way to wait for more."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def note(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class RecordingRouter:
    """A router's stream that keeps what it is told."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.first_tokens: dict[Handle, TokenDelta] = {}
        self.num_bytes: dict[Handle, int] = {}
        self.errors: dict[Handle, TandemError] = {}

    def prefill_done(self, handle: Handle, delta: TokenDelta, queue_s: float, prefill_s: float) -> None:
        assert queue_s >= 0
        assert prefill_s > 0
        self.first_tokens[handle] = delta
        self.arrivals.note()

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None:
        assert seconds > 0
        self.num_bytes[handle] = num_bytes
        self.arrivals.note()

    def failed(self, handle: Handle, error: TandemError) -> None:
        self.errors[handle] = error
        self.arrivals.note()


@dataclass
class Landing:
    """A decode worker's listener for one offer: moves blocks as the contract says."""

    pool: BlockPool
    blocks: tuple[BlockId, ...]
    arrivals: Arrivals
    offer: Offer = field(init=False)
    first_token: TokenId | None = None
    error: TransferError | None = None

    def on_receiving(self) -> None:
        self.pool.start_receiving(self.blocks)

    def on_committed(self, first_token_payload: bytes) -> None:
        self.pool.seal(self.blocks)
        self.first_token = decode_first_token(first_token_payload)
        self.arrivals.note()

    def on_failed(self, error: TransferError) -> None:
        self.error = error
        self.pool.release(self.blocks)

    def on_writer_stopped(self) -> None:
        if all(self.pool.state(block) is BlockState.QUARANTINED for block in self.blocks):
            self.pool.writer_stopped(self.blocks)
        self.arrivals.note()


class Target:
    """The receiving half of a decode worker: a shared pool and its endpoint."""

    def __init__(self, layout: KvLayout, fingerprint: str) -> None:
        self._layout = layout
        self.cache = KvCache.create(layout, NUM_BLOCKS, CPU, shared=True)
        self.cache.fill_poison()
        self.pool = BlockPool(NUM_BLOCKS, layout.block_size)
        self.arrivals = Arrivals()
        memory = PoolMemory(self.cache.blocks_view, self.cache.shared_fd, new_incarnation())
        prints = Fingerprints(fingerprint, layout)
        self.receiver = KvReceiver(memory, prints, MonotonicClock(), ("shm", "tcp"), "127.0.0.1")

    def reserve(self, num_tokens: int) -> Landing:
        blocks = self.pool.allocate(self._layout.blocks_for(num_tokens), BlockState.RESERVED)
        landing = Landing(self.pool, blocks, self.arrivals)
        refs = tuple(BlockRef(block, self.pool.generation(block)) for block in blocks)
        landing.offer = self.receiver.offer(refs, landing, expires_in_s=60.0)
        return landing

    def block_bytes(self, landing: Landing) -> bytes:
        return self.cache.blocks_view[list(landing.blocks)].numpy().tobytes()

    def let_go(self, landing: Landing) -> None:
        if landing.first_token is not None:
            self.pool.release(landing.blocks)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = save_tiny_model(TINY_MODELS[0], tmp_path_factory.mktemp("model"))
    loaded = load_engine(
        EngineOptions(
            model_path=folder,
            device="cpu",
            dtype="float32",
            block_size=BLOCK_SIZE,
            kv_blocks=NUM_BLOCKS,
            attention_backend="reference",
            placement=ThreadPlacement(threads=1),
        )
    )
    yield loaded
    loaded.close()


@pytest.fixture
async def target(engine: Engine) -> AsyncIterator[Target]:
    made = Target(engine.layout, engine.fingerprint)
    await made.receiver.start()
    yield made
    await made.receiver.stop()
    made.pool.assert_idle()
    made.cache.close()


class CountedEngine:
    """The real engine thread; lets tests wait for steps."""

    def __init__(self, engine: Engine) -> None:
        self._thread = engine.thread
        self.num_steps = 0
        self.arrivals = Arrivals()

    async def step(self, batch: SequenceOf[ScheduledSeq]) -> list[SampledToken | None]:
        outputs = await self._thread.step(batch)
        self.num_steps += 1
        self.arrivals.note()
        return outputs


@dataclass
class Rig:
    """A prefill worker on the module's engine, and one router."""

    worker: PrefillWorker
    engine: CountedEngine
    router: RecordingRouter
    num_handles: int = 0

    def prefill(self, spec: SequenceSpec, offer: Offer) -> Handle:
        self.num_handles += 1
        handle = Handle(self.num_handles)
        self.worker.prefill(self.router, handle, spec, offer.ticket, offer.endpoint)
        return handle

    async def settles(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.worker.drained()
        self.worker.check_idle()


@pytest.fixture
async def make_rig(engine: Engine) -> AsyncIterator[Callable[..., Rig]]:
    engine.kv_cache.fill_poison()
    clock = MonotonicClock()
    senders: list[KvSender] = []
    rigs: list[tuple[Rig, asyncio.Task[None]]] = []

    def make(transport: str = "auto", *, overlap: bool = True) -> Rig:
        memory = PoolMemory(engine.kv_cache.blocks_view, None, new_incarnation())
        sender = KvSender(memory, Fingerprints(engine.fingerprint, engine.layout), clock, transport)
        senders.append(sender)
        validator = Validator(Limits(), VOCAB_SIZE, engine.model.config.context_tokens)
        counted = CountedEngine(engine)
        parts = WorkerParts(counted, engine.pool, sender, validator, clock)
        limits = BatchLimits(CHUNK_TOKENS, 8)
        worker = PrefillWorker(parts, limits, HandoffPolicy(overlap=overlap), engine.max_sequence_tokens)
        rigs.append((Rig(worker, counted, RecordingRouter()), asyncio.create_task(worker.run())))
        return rigs[-1][0]

    yield make
    for rig, task in rigs:
        rig.worker.router_lost(rig.router)
        await rig.settles()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for sender in senders:
        await sender.stop()


def spec_of(num_tokens: int, *, seed: int = 0, temperature: float = 0.0) -> SequenceSpec:
    draw = random.Random(f"{num_tokens}-{seed}")
    tokens = tuple(TokenId(draw.randrange(VOCAB_SIZE)) for _ in range(num_tokens))
    sampling = SamplingParams(max_tokens=8, temperature=temperature, seed=seed)
    return SequenceSpec(RequestId(f"r{num_tokens}-{seed}"), tokens, num_tokens, sampling)


def computed_directly(engine: Engine, spec: SequenceSpec) -> tuple[bytes, TokenId]:
    """The prompt's blocks and first token by a runner of its own, in the same chunks."""
    num_blocks = engine.layout.blocks_for(len(spec.token_ids))
    cache = KvCache.create(engine.layout, num_blocks, CPU)
    cache.fill_poison()
    runner, sequence = Runner(engine.model.decoder, cache), Sequence(spec)
    sequence.add_blocks([BlockId(block) for block in range(num_blocks)])
    output = None
    while sequence.num_remaining_tokens:
        num_tokens = min(CHUNK_TOKENS, sequence.num_remaining_tokens)
        (output,) = runner.step([sequence.scheduled(num_tokens)])
        sequence.advance(num_tokens)
    assert output is not None
    return cache.blocks_view.numpy().tobytes(), output.token_id


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_received_blocks_equal_a_directly_computed_prompt_byte_for_byte(
    engine: Engine, target: Target, make_rig: Callable[..., Rig], transport: str, overlap: bool
) -> None:
    rig = make_rig(transport, overlap=overlap)
    for num_tokens in (1, 15, 16, 17, 63, 64, 65, 200):
        spec, landing = spec_of(num_tokens, temperature=1.0), target.reserve(num_tokens)
        handle = rig.prefill(spec, landing.offer)
        await rig.router.arrivals.until(lambda handle=handle: handle in rig.router.num_bytes)
        blocks, first_token = computed_directly(engine, spec)
        assert target.block_bytes(landing) == blocks, num_tokens
        assert landing.first_token == first_token == rig.router.first_tokens[handle].token_ids[0]
        assert rig.router.num_bytes[handle] == len(blocks)
        target.let_go(landing)
    await rig.settles()


async def test_prompts_in_one_ragged_batch_give_the_tokens_they_give_alone(
    engine: Engine, target: Target, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig()
    specs = [spec_of(num_tokens) for num_tokens in (3, 40, 90, 7, 16, 33, 1, 130, 64, 5)]
    landings = [target.reserve(len(spec.token_ids)) for spec in specs]
    handles = [rig.prefill(spec, landing.offer) for spec, landing in zip(specs, landings, strict=True)]
    await rig.router.arrivals.until(lambda: len(rig.router.num_bytes) == len(handles))
    for spec, landing in zip(specs, landings, strict=True):
        assert landing.first_token == computed_directly(engine, spec)[1]
        target.let_go(landing)
    await rig.settles()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
async def test_released_at_any_chunk_both_pools_come_back(
    target: Target, make_rig: Callable[..., Rig], transport: str, num_steps: int
) -> None:
    rig, landing = make_rig(transport), target.reserve(4 * CHUNK_TOKENS)
    handle = rig.prefill(spec_of(4 * CHUNK_TOKENS), landing.offer)
    await rig.engine.arrivals.until(lambda: rig.engine.num_steps >= num_steps)
    rig.worker.release(rig.router, handle)
    target.receiver.withdraw(landing.offer.transfer_id)
    await rig.settles()
    assert rig.router.num_bytes == rig.router.errors == {}
    await target.arrivals.until(lambda: target.pool.num_free == NUM_BLOCKS)


async def test_released_during_the_transfer_both_pools_come_back(target: Target, make_rig: Callable[..., Rig]) -> None:
    rig, landing = make_rig(overlap=False), target.reserve(100)
    handle = rig.prefill(spec_of(100), landing.offer)
    await rig.router.arrivals.until(lambda: handle in rig.router.first_tokens)
    rig.worker.release(rig.router, handle)
    await rig.settles()
    target.receiver.withdraw(
        landing.offer.transfer_id
    )  # as a router releases both; the ticket may not have been shown yet
    await target.arrivals.until(lambda: landing.error is not None or landing.first_token is not None)
    if landing.first_token is not None:  # the transfer was faster than the release
        target.pool.release(landing.blocks)
    await target.arrivals.until(lambda: target.pool.num_free == NUM_BLOCKS)


async def test_a_receiver_that_goes_fails_the_prompt_as_retryable(engine: Engine, make_rig: Callable[..., Rig]) -> None:
    rig, gone = make_rig(), Target(engine.layout, engine.fingerprint)
    await gone.receiver.start()
    landing = gone.reserve(4 * CHUNK_TOKENS)
    handle = rig.prefill(spec_of(4 * CHUNK_TOKENS), landing.offer)
    await gone.receiver.stop()
    await rig.router.arrivals.until(lambda: handle in rig.router.errors)
    assert isinstance(rig.router.errors[handle], TransferError)
    assert rig.router.errors[handle].retryable
    await rig.settles()
    gone.pool.assert_idle()
    gone.cache.close()


async def test_another_model_is_refused_before_a_byte_moves(engine: Engine, make_rig: Callable[..., Rig]) -> None:
    rig, other = make_rig(), Target(engine.layout, "another model")
    await other.receiver.start()
    landing = other.reserve(20)
    handle = rig.prefill(spec_of(20), landing.offer)
    await rig.router.arrivals.until(lambda: handle in rig.router.errors)
    assert "model" in rig.router.errors[handle].message
    await rig.settles()
    await other.receiver.stop()
    other.pool.assert_idle()
    other.cache.close()


@pytest.mark.parametrize("ticket", [b"", b"garbage"])
async def test_a_ticket_that_is_none_fails_its_prompt_alone(
    target: Target, make_rig: Callable[..., Rig], ticket: bytes
) -> None:
    rig, landing = make_rig(), target.reserve(20)
    bad = rig.prefill(spec_of(20), Offer("", ticket, landing.offer.endpoint))
    good = rig.prefill(spec_of(20), landing.offer)
    await rig.router.arrivals.until(lambda: good in rig.router.num_bytes and bad in rig.router.errors)
    assert isinstance(rig.router.errors[bad], TransferError)
    await rig.settles()
    target.let_go(landing)


async def test_a_ticket_for_fewer_blocks_than_the_prompt_has_fails(
    target: Target, make_rig: Callable[..., Rig]
) -> None:
    rig, landing = make_rig(), target.reserve(16)
    handle = rig.prefill(spec_of(40), landing.offer)
    await rig.router.arrivals.until(lambda: handle in rig.router.errors)
    assert isinstance(rig.router.errors[handle], TransferError)
    await rig.settles()
    await target.arrivals.until(lambda: target.pool.num_free == NUM_BLOCKS)
