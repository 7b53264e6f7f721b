"""A decode worker on fakes: an engine that reads its tokens back from the blocks, a receiver driven by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from decode_worker.landing import LandingPolicy
from decode_worker.scheduler import StepLimits
from decode_worker.worker import DecodeWorker, WorkerParts, WorkerPolicy
from engine.block_pool import BlockPool
from engine.engine_thread import EngineBroken
from engine.step import BrokenLogits, Sampled, SampledToken, ScheduledSeq
from kvtransfer.base import BlockRef, HandoffListener, Offer
from tandem.clock import ManualClock
from tandem.errors import TandemError, TransferError
from tandem.first_token import encode_first_token
from tandem.limits import Limits
from tandem.types import Handle, RequestId, SamplingParams, SequenceSpec, TokenDelta, TokenId
from tandem.validation import Validator
from tests.recording_observers import RecordingWorker

VOCAB_SIZE = 1000
WAIT_S = 20.0


def next_token(token_ids: Sequence[int]) -> TokenId:
    """The fake model: depends on every token and its position."""
    state = 7
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 99991
    return TokenId(state % VOCAB_SIZE)


def expected_tokens(spec: SequenceSpec) -> list[TokenId]:
    """Whole completion that the fake model gives."""
    tokens = list(spec.token_ids)
    while len(tokens) < spec.max_total_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in spec.sampling.end_token_ids:
            break
    return tokens[spec.num_prompt_tokens :]


class FakeEngine:
    """Keeps a token per slot where a model would keep KV, and samples from what it finds there."""

    def __init__(self, block_size: int) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.num_steps = 0
        self.error: Exception | None = None
        self.breaks: tuple[int, int] | None = None
        """Seed of the sequences whose logits are broken, and the output from which on."""
        self.batches: list[Sequence[ScheduledSeq]] = []
        self._block_size = block_size
        self._may_end = asyncio.Event()
        self._may_end.set()
        self.stepping = asyncio.Event()

    def hold(self) -> None:
        """Lets no step end until `let_go`."""
        self._may_end.clear()

    def let_go(self) -> None:
        self._may_end.set()

    def put(self, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """What a hand-off would bring."""
        for position, token_id in enumerate(token_ids):
            self.slots[block_ids[position // self._block_size], position % self._block_size] = token_id

    async def step(self, batch: Sequence[ScheduledSeq]) -> list[Sampled | None]:
        self.batches.append(batch)
        self.stepping.set()
        try:
            await self._may_end.wait()
        finally:
            self.stepping.clear()
            self.num_steps += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return [self._compute(seq) for seq in batch]

    def _compute(self, seq: ScheduledSeq) -> Sampled | None:
        end = seq.context_len + len(seq.token_ids)
        where = [(seq.block_table[p // self._block_size], p % self._block_size) for p in range(end)]
        for slot, token_id in zip(where[seq.context_len :], seq.token_ids, strict=True):
            self.slots[slot] = token_id
        if seq.sample is None:
            return None
        if self.breaks is not None:
            seed, output_index = self.breaks
            if seq.sample.params.seed == seed and seq.sample.output_index >= output_index:
                return BrokenLogits()
        return SampledToken(next_token([self.slots[slot] for slot in where]), None)


@dataclass
class FakeOffer:
    blocks: tuple[BlockRef, ...]
    listener: HandoffListener
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

    def offer(self, blocks: tuple[BlockRef, ...], listener: HandoffListener, expires_in_s: float) -> Offer:
        if self.refusal is not None:
            raise self.refusal
        transfer_id = f"transfer-{len(self.offers)}"
        self.offers[transfer_id] = FakeOffer(blocks, listener)
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


@dataclass(eq=False)
class FakeRouter:
    """Remembers what it was told, and lets tests wait for it."""

    tickets: dict[Handle, str] = field(default_factory=dict)
    first: dict[Handle, TokenDelta] = field(default_factory=dict)
    tokens: dict[Handle, list[TokenId]] = field(default_factory=dict)
    ended: list[Handle] = field(default_factory=list)
    errors: dict[Handle, TandemError] = field(default_factory=dict)
    messages: list[list[Handle]] = field(default_factory=list)
    _ends: dict[Handle, int] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def reserved(self, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        self.tickets[handle] = ticket.decode()
        self._news.set()

    def prefill_done(self, handle: Handle, delta: TokenDelta, queue_s: float, prefill_s: float) -> None:
        assert queue_s >= 0
        assert prefill_s >= 0
        assert handle not in self.first
        self.first[handle] = delta
        self._take(handle, delta)

    def deltas(self, deltas: Iterable[tuple[Handle, TokenDelta]]) -> None:
        self.messages.append([])
        for handle, delta in deltas:
            self.messages[-1].append(handle)
            self._take(handle, delta)

    def failed(self, handle: Handle, error: TandemError) -> None:
        assert handle not in self.errors
        self.errors[handle] = error
        self._news.set()

    def _take(self, handle: Handle, delta: TokenDelta) -> None:
        assert handle not in self.ended
        assert handle not in self.errors
        known = self.tokens.setdefault(handle, [])
        assert delta.offset == self._ends.setdefault(handle, delta.offset), "a token was lost or repeated"
        self._ends[handle] = delta.end
        known.extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.ended.append(handle)
        self._news.set()

    async def until(self, holds: Callable[[], object]) -> None:
        """Waits for news until it holds."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._news.clear()
                await self._news.wait()


@dataclass
class Bench:
    """A running worker and everything around it."""

    worker: DecodeWorker
    engine: FakeEngine
    pool: BlockPool
    receiver: FakeReceiver
    clock: ManualClock
    router: FakeRouter
    observer: RecordingWorker
    running: asyncio.Task[None]

    def reserve(self, handle: int, spec: SequenceSpec, *, local_prefill: bool = False) -> Handle:
        self.worker.reserve(self.router, Handle(handle), spec, local_prefill)
        return Handle(handle)

    async def ticket(self, handle: Handle) -> str:
        await self.router.until(lambda: handle in self.router.tickets)
        return self.router.tickets[handle]

    def hand_over(self, ticket: str, spec: SequenceSpec) -> TokenId:
        """Plays the prefill worker to the end; returns the first token."""
        first = next_token(spec.token_ids)
        if not self.receiver.offers[ticket].is_shown:
            self.receiver.show(ticket)
        self.engine.put([ref.block_id for ref in self.receiver.offers[ticket].blocks], spec.token_ids)
        self.receiver.commit(ticket, encode_first_token(first))
        return first

    async def settled(self) -> None:
        """Waits until nobody is here; then everything must be free."""
        async with asyncio.timeout(WAIT_S):
            await self.worker.drained()
        self.worker.check_idle()
        self.observer.check_all_ended()


@pytest.fixture
def make_spec() -> Callable[..., SequenceSpec]:
    def make(
        num_prompt_tokens: int = 5,
        max_tokens: int = 6,
        *,
        salt: int = 0,
        emitted: int = 0,
        timeout_s: float | None = None,
        priority: int = 0,
        end: frozenset[TokenId] = frozenset(),
    ) -> SequenceSpec:
        token_ids = [TokenId((salt * 37 + 11 * i) % VOCAB_SIZE) for i in range(num_prompt_tokens)]
        for _ in range(emitted):
            token_ids.append(next_token(token_ids))
        return SequenceSpec(
            request_id=RequestId(f"r{salt}"),
            token_ids=tuple(token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, end_token_ids=end),
            timeout_s=timeout_s,
            priority=priority,
        )

    return make


@pytest.fixture
def completion() -> Callable[[SequenceSpec], list[TokenId]]:
    return expected_tokens


@pytest.fixture
def open_bench() -> Callable[..., object]:
    """`async with open_bench(num_blocks=…) as bench`: the pool must be idle at the end."""

    @asynccontextmanager
    async def opened(
        num_blocks: int = 64,
        block_size: int = 4,
        max_seqs: int = 8,
        chunk_tokens: int = 16,
        max_queued: int = 64,
        landing: LandingPolicy | None = None,
    ) -> AsyncIterator[Bench]:
        engine, pool, receiver = FakeEngine(block_size), BlockPool(num_blocks, block_size), FakeReceiver()
        clock = ManualClock()
        validator = Validator(Limits(), VOCAB_SIZE, context_tokens=4096)
        policy = WorkerPolicy(
            limits=StepLimits(block_size, max_seqs, chunk_tokens, headroom_tokens=4),
            max_sequence_tokens=num_blocks * block_size,
            max_queued=max_queued,
            landing=landing or LandingPolicy(),
        )
        observer = RecordingWorker()
        worker = DecodeWorker(WorkerParts(engine, pool, receiver, validator, clock, observer), policy)
        running = asyncio.create_task(worker.run())
        bench = Bench(worker, engine, pool, receiver, clock, FakeRouter(), observer, running)
        try:
            yield bench
            await bench.settled()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, EngineBroken):
                await running

    return opened
