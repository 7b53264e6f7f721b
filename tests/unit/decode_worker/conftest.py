"""A decode worker on fakes: an engine that reads its tokens back from the blocks, a receiver driven by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest

from decode_worker.incoming_transfers import TransferPolicy
from decode_worker.scheduler import StepLimits
from decode_worker.worker import DecodeWorker, WorkerParts, WorkerPolicy
from engine.block_pool import BlockPool
from engine.engine_thread import EngineBroken
from engine.step import BrokenLogits, Sampled, SampledToken, SampleSpec, ScheduledSeq, Step, StepResult
from kvtransfer.base import BlockRef, HandoffListener, Offer
from tandem.errors import InternalError, TandemError, TransferError
from tandem.first_tokens import encode_first_tokens
from tandem.lifecycle import BlockState
from tandem.limits import Limits
from tandem.types import BlockId, ChoiceSpec, FinishReason, GroupSpec, Handle, RequestId, SamplingParams, TokenId
from tandem.validation import Validator
from tests.manual_clock import ManualClock
from tests.recording_observers import RecordingWorker

VOCAB_SIZE = 1000
WAIT_S = 10.0


def next_token(token_ids: Sequence[int], seed: int = 0) -> TokenId:
    """The fake model: depends on every token, its position, and the seed."""
    state = 7 + seed
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 99991
    return TokenId(state % VOCAB_SIZE)


def expected_tokens(spec: GroupSpec, index: int = 0) -> list[TokenId]:
    """Whole completion of one choice that the fake model gives."""
    tokens = list(spec.prompt_token_ids)
    while len(tokens) < spec.max_total_tokens:
        tokens.append(next_token(tokens, spec.sampling.of_choice(index).seed))
        if tokens[-1] in spec.sampling.end_token_ids:
            break
    return tokens[spec.num_prompt_tokens :]


class FakeEngine:
    """Keeps a token per slot where a model would keep KV, and samples from what it finds there.

    INVARIANT, checked: from launch to end, no block of a step is freed, and no block changes its owner. At most two
    steps are in flight, and a fed step directly follows the one that feeds it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.num_steps = 0
        self.step_s = 0.0
        """How long it says that a step took: 0 = the next one is launched behind it at once."""
        self.errors: dict[int, Exception] = {}
        """What steps raise, by their number from 0."""
        self.breaks: tuple[int, int] | None = None
        """Seed of the sequences whose logits are broken, and the output from which on."""
        self.steps: list[Step] = []
        self.max_in_flight = 0
        self._pool = pool
        self._may_end = asyncio.Event()
        self._may_end.set()
        self._num_allowed = 0
        self._last: asyncio.Task[StepResult] | None = None
        self._last_drawn: list[int] | None = None
        self._news = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        return len(self.steps) - self.num_steps

    def hold(self) -> None:
        """Lets no step end until `let_go`, but those that `allow` names."""
        self._may_end.clear()

    def let_go(self) -> None:
        self._may_end.set()

    def allow(self, num_steps: int = 1) -> None:
        """Lets that many steps end while held."""
        self._num_allowed += num_steps
        self._may_end.set()

    async def until_launched(self, num_steps: int) -> None:
        """Waits until so many steps were launched."""
        async with asyncio.timeout(WAIT_S):
            while len(self.steps) < num_steps:
                self._news.clear()
                await self._news.wait()

    def put(self, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """What a hand-off would bring."""
        for position, token_id in enumerate(token_ids):
            size = self._pool.block_size
            self.slots[block_ids[position // size], position % size] = token_id

    def launch(self, step: Step) -> asyncio.Task[StepResult]:
        assert step.seqs
        assert self.num_in_flight < 2
        feeds = self._last if self.num_in_flight else None
        assert feeds is not None or all(seq.feed is None for seq in step.seqs)
        self.steps.append(step)
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        tables = [tuple(seq.block_table) for seq in step.seqs]
        self._last = asyncio.create_task(self._run(len(self.steps) - 1, step, tables, self._last))
        self._news.set()
        return self._last

    async def _run(
        self,
        number: int,
        step: Step,
        tables: list[tuple[BlockId, ...]],
        before: asyncio.Task[StepResult] | None,
    ) -> StepResult:
        named = {*(b for table in tables for b in table), *(c.source for c in step.copies)}
        generations = {block: self._pool.generation(block) for block in named}
        assert not {copy.target for copy in step.copies} & {copy.source for copy in step.copies}
        if before is not None:
            await asyncio.wait({before})
        await self._may_end.wait()
        if self._num_allowed:
            self._num_allowed -= 1
            if not self._num_allowed:
                self._may_end.clear()
        self.num_steps += 1
        self._news.set()
        for block, generation in generations.items():
            assert self._pool.state(block) is BlockState.LIVE, "freed under the engine"
            assert self._pool.generation(block) == generation, "freed under the engine"
        is_fed = any(seq.feed is not None for seq in step.seqs)
        if number in self.errors or (is_fed and self._last_drawn is None):
            self._last_drawn = None
            raise self.errors.get(number, InternalError("the step before it failed"))
        return self._compute_all(step, tables)

    def _compute_all(self, step: Step, tables: list[tuple[BlockId, ...]]) -> StepResult:
        for copy in step.copies:
            for offset in range(self._pool.block_size):
                if (copy.source, offset) in self.slots:
                    self.slots[copy.target, offset] = self.slots[copy.source, offset]
        outputs = tuple(self._compute(seq, table) for seq, table in zip(step.seqs, tables, strict=True))
        drawn = [sampled for output in outputs for sampled in output]
        self._last_drawn = [-1 if isinstance(each, BrokenLogits) else each[0].token_id for each in drawn]
        return StepResult(outputs, self.step_s)

    def _compute(self, seq: ScheduledSeq, table: tuple[BlockId, ...]) -> tuple[Sampled, ...]:
        token_ids = list(seq.token_ids)
        if seq.feed is not None:
            assert self._last_drawn is not None
            assert token_ids[-1] == 0
            token_ids[-1] = TokenId(self._last_drawn[seq.feed])
        end, size = seq.context_len + len(token_ids), self._pool.block_size
        where = [(table[p // size], p % size) for p in range(end)]
        for slot, token_id in zip(where[seq.context_len :], token_ids, strict=True):
            self.slots[slot] = token_id
        known = [self.slots[slot] for slot in where]
        return tuple(self._draw(known, sample) for sample in seq.samples)

    def _draw(self, token_ids: list[int], sample: SampleSpec) -> Sampled:
        seed = sample.params.seed
        if self.breaks is not None and seed == self.breaks[0] and sample.output_index >= self.breaks[1]:
            return BrokenLogits()
        return (SampledToken(next_token(token_ids, seed), None),)


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


Choice = tuple[Handle, int]


@dataclass(eq=False)
class FakeRouter:
    """Remembers what it was told, and lets tests wait for it."""

    tickets: dict[Handle, str] = field(default_factory=dict)
    prefilled: set[Handle] = field(default_factory=set)
    choices: dict[Choice, list[TokenId]] = field(default_factory=dict)
    first_offsets: dict[Choice, int] = field(default_factory=dict)
    finished: dict[Choice, FinishReason] = field(default_factory=dict)
    num_choices: dict[Handle, int] = field(default_factory=dict)
    """Choices that it waits for."""
    errors: dict[Handle, TandemError] = field(default_factory=dict)
    order: list[Choice] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> dict[Handle, list[TokenId]]:
        """Of each handle's first choice."""
        return {handle: tokens for (handle, index), tokens in self.choices.items() if index == 0}

    @property
    def ended(self) -> list[Handle]:
        """Handles all of whose choices have finished."""
        return [h for h, n in self.num_choices.items() if sum(handle == h for handle, _ in self.finished) == n]

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        assert held_tokens == 0
        self.tickets[handle] = ticket.decode()
        self._news.set()

    def prefill_done(self, handle: Handle, queue_s: float, prefill_s: float) -> None:
        assert queue_s >= 0
        assert prefill_s >= 0
        assert handle not in self.prefilled
        assert not any(choice[0] == handle for choice in self.choices)
        self.prefilled.add(handle)

    def token(
        self, handle: Handle, index: int, offset: int, token: SampledToken, finish_reason: FinishReason | None
    ) -> None:
        choice = (handle, index)
        assert choice not in self.finished
        assert handle not in self.errors
        self.order.append(choice)
        known = self.choices.setdefault(choice, [])
        assert offset == self.first_offsets.setdefault(choice, offset) + len(known), "a token was lost or repeated"
        known.append(token.token_id)
        if finish_reason is not None:
            self.finished[choice] = finish_reason
        self._news.set()

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None:
        raise AssertionError("a decode worker hands nothing over")

    def failed(self, handle: Handle, error: TandemError) -> None:
        assert handle not in self.errors
        self.errors[handle] = error
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

    def reserve(
        self, handle: int, spec: GroupSpec, *, local_prefill: bool = False, router: FakeRouter | None = None
    ) -> Handle:
        """As `WorkerServicer` does: what is raised is told as failed."""
        router = router or self.router
        router.num_choices.setdefault(Handle(handle), len(spec.choices))
        try:
            self.worker.reserve(router, Handle(handle), spec, local_prefill)
        except TandemError as error:
            router.failed(Handle(handle), error)
        return Handle(handle)

    async def ticket(self, handle: Handle) -> str:
        await self.router.until(lambda: handle in self.router.tickets)
        return self.router.tickets[handle]

    def hand_over(self, ticket: str, spec: GroupSpec) -> dict[int, TokenId]:
        """Plays the prefill worker to the end; returns the first tokens by choice."""
        prefix = spec.prefix_token_ids
        due = spec.choices if len(spec.choices) == 1 else [each for each in spec.choices if not each.output_token_ids]
        first = {each.index: next_token(prefix, spec.sampling.of_choice(each.index).seed) for each in due}
        if not self.receiver.offers[ticket].is_shown:
            self.receiver.show(ticket)
        self.engine.put([ref.block_id for ref in self.receiver.offers[ticket].blocks], prefix)
        for choice in due:
            is_last = len(choice.output_token_ids) + 1 == spec.sampling.max_tokens
            if is_last or first[choice.index] in spec.sampling.end_token_ids:
                self.router.finished[self.owner(ticket), choice.index] = FinishReason.LENGTH
        self.receiver.commit(ticket, encode_first_tokens(first))
        return first

    def owner(self, ticket: str) -> Handle:
        return next(handle for handle, each in self.router.tickets.items() if each == ticket)

    async def settled(self) -> None:
        """Waits until nobody is here; then everything must be free."""
        async with asyncio.timeout(WAIT_S):
            await self.worker.drained()
        self.worker.check_idle()
        self.observer.check_all_ended()


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
        end: frozenset[TokenId] = frozenset(),
    ) -> GroupSpec:
        """`emitted`: how many tokens each choice has already."""
        token_ids = tuple(TokenId((salt * 37 + 11 * i) % VOCAB_SIZE) for i in range(num_prompt_tokens))
        spec = GroupSpec(
            request_id=RequestId(f"r{salt}"),
            prompt_token_ids=token_ids,
            sampling=SamplingParams(max_tokens=max_tokens, end_token_ids=end),
            timeout_s=timeout_s,
            priority=priority,
        )
        counts = [emitted] * n if isinstance(emitted, int) else emitted
        choices = [ChoiceSpec(i, tuple(expected_tokens(spec, i)[:count])) for i, count in enumerate(counts)]
        return replace(spec, choices=tuple(choices))

    return make


@pytest.fixture
def make_router() -> Callable[[], FakeRouter]:
    return FakeRouter


@pytest.fixture
def completion() -> Callable[..., list[TokenId]]:
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
        transfers: TransferPolicy | None = None,
        *,
        overlap_steps: bool = True,
    ) -> AsyncIterator[Bench]:
        pool, receiver = BlockPool(num_blocks, block_size), FakeReceiver()
        engine, clock = FakeEngine(pool), ManualClock()
        validator = Validator(Limits(), VOCAB_SIZE, context_tokens=4096)
        policy = WorkerPolicy(
            limits=StepLimits(block_size, max_seqs, chunk_tokens, headroom_tokens=4),
            max_sequence_tokens=num_blocks * block_size,
            max_queued=max_queued,
            transfers=transfers or TransferPolicy(),
            overlap_steps=overlap_steps,
        )
        observer = RecordingWorker()
        worker = DecodeWorker(WorkerParts(engine, pool, receiver, validator, clock, observer), policy)
        running = asyncio.create_task(worker.run())
        bench = Bench(worker, engine, pool, receiver, clock, FakeRouter(), observer, running)
        try:
            yield bench
            await bench.settled()
        finally:
            engine.let_go()
            running.cancel()
            with suppress(asyncio.CancelledError, EngineBroken):
                await running

    return opened
