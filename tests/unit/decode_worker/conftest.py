"""A decode worker on fakes: an engine that reads its tokens back from the blocks, a receiver driven by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import pytest

from decode_worker.decodes import Decodes
from decode_worker.running_batch import RunningBatch
from decode_worker.worker import new_decode_worker
from engine.beam import num_candidates
from engine.block_pool import BlockPool
from engine.engine_thread import EngineBroken
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache
from kvtransfer.base import BlockRef, HandoffListener, Offer
from shell.config import DecodeConfig
from tandem.errors import TandemError, TransferError
from tandem.first_tokens import FirstTokens, encode_first_tokens
from tandem.types import (
    ChoiceSpec,
    FinishReason,
    GroupSpec,
    Handle,
    RequestId,
    SamplingParams,
    TokenId,
)
from tests.heard_router import HeardRouter
from tests.manual_clock import ManualClock
from tests.recorded_events import RecordedWorker
from tests.token_engine import VOCAB_SIZE, WAIT_S, FakeEngine, candidates, expected_tokens, next_token
from tests.worker_parts import parts_of
from worker import admission
from worker.core import Worker


@dataclass
class FakeOffer:
    blocks: Sequence[BlockRef]
    listener: HandoffListener
    first_block: int = 0
    is_over: bool = False
    is_shown: bool = False


class FakeReceiver:
    """A receiver whose peer is the test. A shown offer that is withdrawn waits for `writer_stops`."""

    def __init__(self) -> None:
        self.offers: dict[str, FakeOffer] = {}
        self.refusal: TandemError | None = None

    @property
    def num_live(self) -> int:
        return sum(not offer.is_over for offer in self.offers.values())

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def reap(self) -> None: ...

    def offer(
        self, blocks: Sequence[BlockRef], listener: HandoffListener, expires_in_s: float, first_block: int = 0
    ) -> Offer:
        if self.refusal is not None:
            raise self.refusal
        transfer_id = f"transfer-{len(self.offers)}"
        self.offers[transfer_id] = FakeOffer(blocks, listener, first_block)
        return Offer(transfer_id, transfer_id.encode(), b"endpoint")

    def withdraw(self, transfer_id: str) -> None:
        offer = self.offers[transfer_id]
        if not offer.is_over:
            self.fail(transfer_id)

    def show(self, transfer_id: str) -> None:
        self.offers[transfer_id].is_shown = True
        self.offers[transfer_id].listener.on_receiving()

    def fail(self, transfer_id: str) -> None:
        offer = self.offers[transfer_id]
        offer.is_over = True
        offer.listener.on_failed(TransferError("it broke"))
        if not offer.is_shown:
            offer.listener.on_writer_stopped()

    def writer_stops(self, transfer_id: str) -> None:
        self.offers[transfer_id].listener.on_writer_stopped()

    def commit(self, transfer_id: str, payload: bytes) -> None:
        self.offers[transfer_id].is_over = True
        self.offers[transfer_id].listener.on_committed(payload)


@dataclass
class Bench:
    """A running worker and everything around it."""

    worker: Worker
    engine: FakeEngine
    pool: BlockPool
    cache: PrefixCache
    receiver: FakeReceiver
    clock: ManualClock
    router: HeardRouter
    recorded: RecordedWorker
    running: asyncio.Task[None]

    @property
    def batch(self) -> RunningBatch:
        """The worker's own."""
        decodes = self.worker._decodes
        assert isinstance(decodes, Decodes)
        return decodes._batch

    def reserve(
        self,
        handle: int,
        spec: GroupSpec,
        *,
        local_prefill: bool = False,
        router: HeardRouter | None = None,
        max_local_tokens: int | None = None,
    ) -> Handle:
        """As `WorkerServicer` does: what is raised is told as failed."""
        router = router or self.router
        router.num_choices.setdefault(Handle(handle), len(spec.choices))
        try:
            self.worker.reserve(router, Handle(handle), spec, local_prefill, max_local_tokens)
        except TandemError as error:
            router.failed(Handle(handle), error)
        return Handle(handle)

    async def ticket(self, handle: Handle) -> str:
        await self.router.until(lambda: handle in self.router.tickets)
        return self.router.tickets[handle]

    def hand_off(self, ticket: str, spec: GroupSpec) -> dict[int, TokenId]:
        """Plays the prefill worker to the end; returns the first tokens by choice."""
        prefix = spec.prefix_token_ids
        if spec.sampling.beam_width:
            self._land(ticket, prefix, candidates(prefix, num_candidates(spec.sampling)))
            return {}
        due = spec.choices if len(spec.choices) == 1 else [each for each in spec.choices if not each.output_token_ids]
        first = {each.index: next_token(prefix, spec.sampling.of_choice(each.index).seed) for each in due}
        for choice in due:
            is_last = len(choice.output_token_ids) + 1 == spec.sampling.max_tokens
            if is_last or first[choice.index] in spec.sampling.end_token_ids:
                self.router.finished[self.owner(ticket), choice.index] = FinishReason.LENGTH
        self._land(ticket, prefix, first)
        return first

    def _land(self, ticket: str, prefix: tuple[TokenId, ...], first: FirstTokens) -> None:
        offer = self.receiver.offers[ticket]
        if not offer.is_shown:
            self.receiver.show(ticket)
        lacked = prefix[offer.first_block * self.pool.block_size :]
        self.engine.put([ref.block_id for ref in offer.blocks], lacked)
        self.receiver.commit(ticket, encode_first_tokens(first))

    def owner(self, ticket: str) -> Handle:
        return next(handle for handle, each in self.router.tickets.items() if each == ticket)

    async def settled(self) -> None:
        """Waits until nobody is here; then everything must be free, or known and nobody's."""
        async with asyncio.timeout(WAIT_S):
            await self.worker.drained()
        self.worker.check_idle()
        assert self.cache.num_available == self.pool.num_blocks
        self.pool.release(self.cache.allocate(self.pool.num_blocks))  # which evicts all that is known
        self.pool.check_invariants()
        self.recorded.check_all_ended()
        assert not self.router.leaving_handles | self.router.handoffs.keys(), "it has no sender"


@pytest.fixture
def make_spec() -> Callable[..., GroupSpec]:
    def make(
        num_prompt_tokens: int = 5,
        max_tokens: int = 6,
        *,
        n: int = 1,
        salt: int = 0,
        emitted: int | Sequence[int] = 0,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        end: frozenset[TokenId] = frozenset(),
        beam_width: int = 0,
    ) -> GroupSpec:
        """`emitted`: how many tokens each choice has already."""
        token_ids = tuple(TokenId((salt * 37 + 11 * i) % VOCAB_SIZE) for i in range(num_prompt_tokens))
        spec = GroupSpec(
            request_id=RequestId(f"r{salt}"),
            prompt_token_ids=token_ids,
            sampling=SamplingParams(max_tokens=max_tokens, end_token_ids=end, beam_width=beam_width),
            timeout_s=timeout_s,
            priority=priority,
            cache_salt=cache_salt,
        )
        counts = [emitted] * n if isinstance(emitted, int) else emitted
        choices = [
            ChoiceSpec(i, tuple(expected_tokens(spec, i)[:count] if count else ())) for i, count in enumerate(counts)
        ]
        return replace(spec, choices=tuple(choices))

    return make


@pytest.fixture
def completion() -> Callable[..., list[TokenId]]:
    return expected_tokens


@pytest.fixture
def open_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """`async with open_bench(num_blocks=…) as bench`: the pool must be idle at the end. Two overtakes are many."""
    monkeypatch.setattr(admission, "MAX_OVERTAKES", 2)

    @asynccontextmanager
    async def opened(
        num_blocks: int = 64,
        block_size: int = 4,
        max_seqs: int = 8,
        chunk_tokens: int = 16,
        *,
        overlap_steps: bool = True,
        is_asynchronous: bool = False,
        prefix_cache: bool = True,
        host_rows: int = 0,
        first_guess_tokens: int = 4,
    ) -> AsyncIterator[Bench]:
        pool, receiver = BlockPool(num_blocks, block_size), FakeReceiver()
        tier = HostTier(host_rows, 1) if host_rows else None
        cache = PrefixCache(pool, enabled=prefix_cache, tier=tier)
        engine, clock = FakeEngine(pool, is_asynchronous=is_asynchronous), ManualClock()
        recorded, max_tokens = RecordedWorker(), num_blocks * block_size
        sizes = {"max_seqs": max_seqs, "chunk_tokens": chunk_tokens, "max_tokens": max_tokens}
        parts = parts_of(engine, cache, clock, **sizes, events=recorded.events)
        config = DecodeConfig(overlap_steps="auto" if overlap_steps else "off")
        worker = new_decode_worker(parts, receiver, config, first_guess_tokens=first_guess_tokens)
        running = asyncio.create_task(worker.run())
        bench = Bench(worker, engine, pool, cache, receiver, clock, HeardRouter(), recorded, running)
        try:
            yield bench
            await bench.settled()
        finally:
            engine.let_go()
            running.cancel()
            with suppress(asyncio.CancelledError, EngineBroken):
                await running

    return opened
