"""The prefill worker with a real engine pushing into a real receiver, over shm and tcp."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from engine.group import Group
from engine.kv_cache import KvCache
from engine.loading import Engine, load_engine
from engine.runner import Runner
from engine.step import Step, StepResult
from kvtransfer.base import Fingerprints, Offer, PoolMemory
from kvtransfer.sender import KvSender
from prefill_worker.prompts import new_prefill_worker
from shell.clock import MonotonicClock
from shell.config import WorkerConfig
from tandem.errors import TransferError
from tandem.types import (
    BlockId,
    ChoiceSpec,
    GroupSpec,
    Handle,
    RequestId,
    SamplingParams,
    TokenId,
    new_incarnation,
)
from tests.heard_router import HeardRouter
from tests.receiving_pool import NUM_BLOCKS, Arrivals, Target
from tests.worker_parts import parts_of
from worker.core import Worker

CPU = torch.device("cpu")
BLOCK_SIZE, CHUNK_TOKENS = 16, 64
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = save_tiny_model(TINY_MODELS[0], tmp_path_factory.mktemp("model"))
    loaded = load_engine(
        WorkerConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            block_size=BLOCK_SIZE,
            kv_blocks=NUM_BLOCKS,
            attention_backend="reference",
            threads=1,
        )
    )
    yield loaded
    loaded.close()


@pytest.fixture
async def target(engine: Engine) -> AsyncIterator[Target]:
    made = Target(engine.layout, engine.model.fingerprint)
    await made.receiver.start()
    yield made
    await made.receiver.stop()
    made.pool.assert_idle()
    made.cache.close()


class CountedEngine:
    """The real engine thread; lets tests wait for steps."""

    def __init__(self, engine: Engine) -> None:
        self._thread = engine.thread
        self.is_asynchronous = engine.thread.is_asynchronous
        self.num_steps = 0
        self.arrivals = Arrivals()

    def launch(self, step: Step) -> asyncio.Task[StepResult]:
        return asyncio.create_task(self._note(self._thread.launch(step)))

    async def _note(self, launched: asyncio.Future[StepResult]) -> StepResult:
        result = await launched
        self.num_steps += 1
        self.arrivals.note()
        return result


@dataclass
class Rig:
    """A prefill worker on the module's engine, and one router."""

    worker: Worker
    engine: CountedEngine
    router: HeardRouter
    num_handles: int = 0

    def prefill(self, spec: GroupSpec, offer: Offer) -> Handle:
        self.num_handles += 1
        handle = Handle(self.num_handles)
        self.worker.prefill(self.router, handle, spec, "decode-1")
        self.worker.grant(self.router, handle, offer.ticket, offer.endpoint)
        return handle

    async def handed_off(self, handle: Handle) -> None:
        """Fails with what the router is told if the hand-off fails."""
        told = self.router
        await told.until(lambda: handle in told.handoffs or handle in told.errors)
        assert handle not in told.errors, told.errors[handle]

    def first_tokens(self, handle: Handle) -> dict[int, TokenId]:
        return {index: first.token_ids[0] for index, first in self.router.firsts[handle].items()}

    async def settles(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.worker.drained()
        self.worker.check_idle()


@pytest.fixture
async def make_rig(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Rig]]:
    # A machine that stands still for 5 s opens no hand-off in time; that fails the prompt, as it should.
    monkeypatch.setattr("prefill_worker.outgoing_transfer._OPEN_TIMEOUT_S", DEADLINE_S)
    engine.cache.clear()
    engine.kv_cache.fill_poison()
    clock = MonotonicClock()
    senders: list[KvSender] = []
    rigs: list[tuple[Rig, asyncio.Task[None]]] = []

    def make(transport: str = "auto") -> Rig:
        memory = PoolMemory(engine.kv_cache.blocks_view, None, new_incarnation())
        sender = KvSender(memory, Fingerprints(engine.model.fingerprint, engine.layout), clock, transport)
        senders.append(sender)
        counted, max_tokens = CountedEngine(engine), engine.sizes.max_sequence_tokens
        sizes = {"max_seqs": 8, "chunk_tokens": CHUNK_TOKENS, "max_tokens": max_tokens, "vocab_size": VOCAB_SIZE}
        parts = parts_of(counted, engine.cache, **sizes)
        worker = new_prefill_worker(parts, sender)
        rigs.append((Rig(worker, counted, HeardRouter()), asyncio.create_task(worker.run())))
        return rigs[-1][0]

    yield make
    for rig, task in rigs:
        rig.worker.router_lost(rig.router)
        await rig.settles()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for sender in senders:
        await sender.stop()


def spec_of(num_tokens: int, *, seed: int = 0, temperature: float = 0.0, n: int = 1) -> GroupSpec:
    draw = random.Random(f"{num_tokens}-{seed}")
    tokens = tuple(TokenId(draw.randrange(VOCAB_SIZE)) for _ in range(num_tokens))
    sampling = SamplingParams(max_tokens=8, temperature=temperature, seed=seed)
    return GroupSpec(RequestId(f"r{num_tokens}-{seed}"), tokens, sampling, tuple(map(ChoiceSpec, range(n))))


def computed_directly(engine: Engine, spec: GroupSpec) -> tuple[bytes, dict[int, TokenId]]:
    """The prompt's blocks and first tokens by a runner of its own, in the same chunks."""
    num_blocks = engine.layout.blocks_for(spec.num_prompt_tokens)
    cache = KvCache.create(engine.layout, num_blocks, CPU)
    cache.fill_poison()
    runner, prefix = Runner(engine.model.decoder, cache), Group(spec).prefix
    prefix.add_blocks([BlockId(block) for block in range(num_blocks)])
    result: StepResult | None = None
    while prefix.num_computed_tokens < spec.num_prompt_tokens:
        num_tokens = min(CHUNK_TOKENS, spec.num_prompt_tokens - prefix.num_computed_tokens)
        result = runner.collect(runner.launch(runner.prepare(Step((prefix.schedule(num_tokens),))), None))
    assert result is not None
    tokens: dict[int, TokenId] = {}
    for drawer, sampled in zip(prefix.drawers, result.outputs[0], strict=True):
        assert isinstance(sampled, tuple)
        tokens[drawer.index] = sampled[0].token_id
    return cache.blocks_view.numpy().tobytes(), tokens


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_received_blocks_equal_a_directly_computed_prompt_byte_for_byte(
    engine: Engine, target: Target, make_rig: Callable[..., Rig], transport: str
) -> None:
    rig = make_rig(transport)
    for num_tokens in (1, 15, 16, 17, 63, 64, 65, 200):
        spec, landing = spec_of(num_tokens, temperature=1.0), target.reserve(num_tokens)
        handle = rig.prefill(spec, landing.offer)
        await rig.handed_off(handle)
        blocks, first_tokens = computed_directly(engine, spec)
        assert target.block_bytes(landing) == blocks, num_tokens
        assert landing.first_tokens == first_tokens == rig.first_tokens(handle)
        assert rig.router.handoffs[handle][0] == len(blocks)
        target.let_go(landing)
    await rig.settles()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_prompt_whose_blocks_are_found_arrives_as_one_that_is_computed(
    engine: Engine, target: Target, make_rig: Callable[..., Rig], transport: str
) -> None:
    rig, first = make_rig(transport), spec_of(200, temperature=1.0)
    turns = [first, first, replace(first, prompt_token_ids=first.prompt_token_ids + spec_of(50).prompt_token_ids)]
    for spec, num_computed in zip(turns, (200, 8, 58), strict=True):
        landing = target.reserve(spec.num_prompt_tokens)
        handle = rig.prefill(spec, landing.offer)
        await rig.handed_off(handle)
        assert rig.router.cached_tokens[handle] == spec.num_prompt_tokens - num_computed
        blocks, first_tokens = computed_directly(engine, spec)
        assert target.block_bytes(landing) == blocks
        assert landing.first_tokens == first_tokens == rig.first_tokens(handle)
        target.let_go(landing)
    await rig.settles()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
async def test_a_prompt_that_was_released_at_any_chunk_is_found_as_far_as_it_was_computed(
    engine: Engine, target: Target, make_rig: Callable[..., Rig], num_steps: int
) -> None:
    rig, spec, landing = make_rig(), spec_of(3 * CHUNK_TOKENS), target.reserve(3 * CHUNK_TOKENS)
    handle = rig.prefill(spec, landing.offer)
    await rig.engine.arrivals.until(lambda: rig.engine.num_steps >= num_steps)
    rig.worker.release(rig.router, handle)
    target.receiver.withdraw(landing.offer.transfer_id)
    await rig.settles()
    landing = target.reserve(spec.num_prompt_tokens)
    again = rig.prefill(spec, landing.offer)
    await rig.handed_off(again)
    assert rig.router.cached_tokens[again] >= num_steps * CHUNK_TOKENS
    blocks, first_tokens = computed_directly(engine, spec)
    assert (target.block_bytes(landing), landing.first_tokens) == (blocks, first_tokens)
    target.let_go(landing)
    await rig.settles()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_only_the_blocks_that_an_offer_asks_for_travel(
    engine: Engine, target: Target, make_rig: Callable[..., Rig], transport: str
) -> None:
    rig, spec, first_block = make_rig(transport), spec_of(200), 5
    landing = target.reserve(200, first_block)
    handle = rig.prefill(spec, landing.offer)
    await rig.handed_off(handle)
    blocks, first_tokens = computed_directly(engine, spec)
    assert target.block_bytes(landing) == blocks[first_block * engine.layout.block_bytes :]
    assert rig.router.handoffs[handle][0] == len(blocks) - first_block * engine.layout.block_bytes
    assert landing.first_tokens == first_tokens
    target.let_go(landing)
    await rig.settles()


async def test_each_choice_draws_the_token_that_a_request_with_its_seed_draws(
    engine: Engine, target: Target, make_rig: Callable[..., Rig]
) -> None:
    rig, spec, landing = make_rig(), spec_of(90, seed=7, temperature=1.0, n=8), target.reserve(90)
    handle = rig.prefill(spec, landing.offer)
    await rig.handed_off(handle)
    alone = {}
    for index in range(8):
        single = replace(spec, sampling=replace(spec.sampling, seed=7 + index), choices=(ChoiceSpec(0),))
        alone[index] = computed_directly(engine, single)[1][0]
    assert landing.first_tokens == rig.first_tokens(handle) == alone
    assert len(set(alone.values())) > 1
    assert rig.engine.num_steps == 2
    target.let_go(landing)
    await rig.settles()


async def test_prompts_in_one_ragged_batch_give_the_tokens_they_give_alone(
    engine: Engine, target: Target, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig()
    specs = [spec_of(num_tokens) for num_tokens in (3, 40, 90, 7, 16, 33, 1, 130, 64, 5)]
    landings = [target.reserve(spec.num_prompt_tokens) for spec in specs]
    handles = [rig.prefill(spec, landing.offer) for spec, landing in zip(specs, landings, strict=True)]
    for handle in handles:
        await rig.handed_off(handle)
    for spec, landing in zip(specs, landings, strict=True):
        assert landing.first_tokens == computed_directly(engine, spec)[1]
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
    assert rig.router.handoffs == rig.router.errors == {}
    await target.arrivals.until(lambda: target.pool.num_free == NUM_BLOCKS)


async def test_released_during_the_transfer_both_pools_come_back(target: Target, make_rig: Callable[..., Rig]) -> None:
    rig, landing = make_rig(), target.reserve(100)
    handle = rig.prefill(spec_of(100), landing.offer)
    await rig.router.until(lambda: handle in rig.router.first_tokens)
    rig.worker.release(rig.router, handle)
    await rig.settles()
    target.receiver.withdraw(
        landing.offer.transfer_id
    )  # as a router releases both; the ticket may not have been shown yet
    await target.arrivals.until(lambda: landing.error is not None or landing.first_tokens is not None)
    if landing.first_tokens is not None:  # the transfer was faster than the release
        target.pool.release(landing.blocks)
    await target.arrivals.until(lambda: target.pool.num_free == NUM_BLOCKS)


async def test_a_receiver_that_goes_fails_the_prompt_as_retryable(engine: Engine, make_rig: Callable[..., Rig]) -> None:
    rig, gone = make_rig(), Target(engine.layout, engine.model.fingerprint)
    await gone.receiver.start()
    landing = gone.reserve(4 * CHUNK_TOKENS)
    handle = rig.prefill(spec_of(4 * CHUNK_TOKENS), landing.offer)
    await gone.receiver.stop()
    await rig.router.until(lambda: handle in rig.router.errors)
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
    await rig.router.until(lambda: handle in rig.router.errors)
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
    await rig.router.until(lambda: good in rig.router.handoffs and bad in rig.router.errors)
    assert isinstance(rig.router.errors[bad], TransferError)
    await rig.settles()
    target.let_go(landing)
