"""A decode worker that drains gives what it runs to another one: a router's attempts on two real cores."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from decode_worker.worker import new_decode_worker
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.step import Step
from kvtransfer.base import BlockRef, HandoffListener, Offer
from router.attempt import Attempt
from router.delivery import Delivery
from router.placement import Placement
from shell.config import DecodeConfig
from tandem.errors import Reason, TandemError, TransferError
from tandem.types import (
    GroupSpec,
    Incarnation,
    TokenId,
    WorkerId,
    WorkerInfo,
)
from tests.decode_rows import seqs_of
from tests.joined_cores import CoreLink, Cores, Ids, attempt_of, delivery_of, spec_of
from tests.manual_clock import ManualClock
from tests.recorded_events import RecordedRequest, RecordedWorker
from tests.registering import INFO
from tests.token_engine import WAIT_S, FakeEngine, expected_tokens
from tests.wire import BLOCK_SIZE, Wire, WireHandoff
from tests.worker_parts import parts_of
from worker.core import Worker
from worker.ports import Destination

NUM_BLOCKS = 64


class SlowWire(Wire):
    """One that may be held before the first block, and broken."""

    def __init__(self, source: FakeEngine, target: FakeEngine) -> None:
        super().__init__(source, target)
        self.open_now = asyncio.Event()
        self.open_now.set()
        self.num_opened = 0
        self.error: TandemError | None = None

    async def open(self, ticket: bytes, endpoint: bytes, timeout_s: float) -> WireHandoff:
        self.num_opened += 1
        await self.open_now.wait()
        if self.error is not None:
            raise self.error
        return await super().open(ticket, endpoint, timeout_s)


class NoOffers:
    """The receiver of a worker that nothing is sent to."""

    num_live = 0

    def offer(
        self, blocks: Sequence[BlockRef], listener: HandoffListener, expires_in_s: float, first_block: int = 0
    ) -> Offer:
        raise AssertionError("nothing moves to this worker")

    def withdraw(self, transfer_id: str) -> None: ...

    def reap(self) -> None: ...


@dataclass
class Stream:
    """One request: its attempt on the first worker, then on the second."""

    spec: GroupSpec
    delivery: Delivery
    ids: list[list[TokenId]]
    recorded: RecordedRequest
    attempt: Attempt
    task: asyncio.Task[None]

    @property
    def tokens(self) -> list[TokenId]:
        return self.ids[0]


@dataclass
class Decoder:
    """One worker."""

    info: WorkerInfo
    engine: FakeEngine
    cache: PrefixCache
    core: Worker
    link: CoreLink
    recorded: RecordedWorker = field(default_factory=RecordedWorker)


class TwoDecoders(Cores):
    """`old` sends to `new`. Leaving the context checks that both are idle."""

    def __init__(
        self, num_blocks: int = NUM_BLOCKS, *, old_blocks: int = NUM_BLOCKS, overlap_steps: bool = True
    ) -> None:
        self.clock = ManualClock()
        engines = [FakeEngine(BlockPool(count, BLOCK_SIZE)) for count in (old_blocks, num_blocks)]
        self.wire = SlowWire(*engines)
        receivers: list[Any] = [NoOffers(), self.wire]
        senders: list[Any] = [self.wire, None]
        self.old, self.new = (
            self._decoder(name, engine, receiver, sender, overlap_steps=overlap_steps)
            for name, engine, receiver, sender in zip(("old", "new"), engines, receivers, senders, strict=True)
        )

    def _decoder(self, name: str, engine: FakeEngine, receiver: Any, sender: Any, *, overlap_steps: bool) -> Decoder:
        info = replace(INFO, worker_id=WorkerId(name), incarnation=Incarnation(name), max_sequence_tokens=4096)
        cache, recorded = PrefixCache(engine._pool), RecordedWorker()
        parts = parts_of(engine, cache, self.clock, max_seqs=8, chunk_tokens=16, events=recorded.events)
        config = DecodeConfig(overlap_steps="auto" if overlap_steps else "off")
        core = new_decode_worker(parts, receiver, config, sender, first_guess_tokens=4)
        return Decoder(info, engine, cache, core, CoreLink(info, core), recorded)

    @property
    def workers(self) -> list[tuple[FakeEngine, Worker, CoreLink]]:
        return [(each.engine, each.core, each.link) for each in (self.old, self.new)]

    async def __aexit__(self, *_: object) -> None:
        self.wire.open_now.set()
        await super().__aexit__()
        for each in (self.old, self.new):
            each.cache.check_invariants()
            each.recorded.check_all_ended()

    def link(self, info: WorkerInfo) -> CoreLink:
        """As `Workers` gives it."""
        return self.old.link if info is self.old.info else self.new.link

    def start(self, spec: GroupSpec) -> Stream:
        """On the old one, which computes the prompt."""
        ids = [Ids() for _ in spec.choices]
        delivery, recorded = delivery_of(ids), RecordedRequest()
        attempt = attempt_of(self, Placement(None, self.old.info), delivery, 60.0, recorded.events)
        task = asyncio.create_task(attempt.run(spec))
        return Stream(spec, delivery, [each.ids for each in ids], recorded, attempt, task)

    async def move(self, stream: Stream) -> None:
        """Once it leaves: the new one is asked to take it over."""
        async with asyncio.timeout(WAIT_S):
            await stream.task
        assert stream.attempt.leaves
        choices = [replace(each, output_token_ids=each.output_token_ids[:-1]) for each in stream.delivery.open_choices]
        known = replace(stream.spec, choices=tuple(choices))
        placement = Placement(self.old.info, self.new.info)
        stream.attempt = attempt_of(self, placement, stream.delivery, 60.0, stream.recorded.events, stream.attempt)
        stream.task = asyncio.create_task(stream.attempt.run(known))

    async def finish(self, *streams: Stream) -> None:
        """All of them, each with exactly its tokens."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(each.task for each in streams))
        for each in streams:
            each.attempt.release()
            assert each.ids == [expected_tokens(each.spec, index) for index in range(len(each.spec.choices))]

    async def step_until(self, condition: Callable[[], object]) -> None:
        """Lets steps of the old one, which is held, end one by one."""
        engine = self.old.engine
        while not condition():
            num_steps = engine.num_steps
            engine.allow()
            await self.until(lambda num_steps=num_steps: engine.num_steps > num_steps)
            await asyncio.sleep(0.001)  # what it brought is told


def computed_tokens(steps: list[Step]) -> int:
    return sum(len(seq.token_ids) for step in steps for seq in seqs_of(step))


@asynccontextmanager
async def drained_at(num_tokens: int, spec: GroupSpec, **options: Any) -> AsyncIterator[tuple[TwoDecoders, Stream]]:
    """A request that has so many tokens when its worker begins to drain; no step ends from then on."""
    async with TwoDecoders(**options) as cores:
        cores.old.engine.hold()
        stream = cores.start(spec)
        await cores.step_until(lambda: len(stream.tokens) >= num_tokens)
        cores.old.core.drain()
        yield cores, stream


@pytest.mark.parametrize("overlap_steps", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", range(9, 14))
async def test_it_goes_on_where_it_was_with_its_kv(num_prompt_tokens: int, overlap_steps: bool) -> None:
    spec = spec_of(num_prompt_tokens, 60)
    async with drained_at(7, spec, overlap_steps=overlap_steps) as (cores, stream):
        await cores.move(stream)
        cores.old.engine.let_go()
        await cores.finish(stream)
        computed = computed_tokens(cores.new.engine.steps)
        handed = [call for call in stream.recorded.calls if call[0] == "KvArrived"]
        (moved,) = cores.old.recorded.sequences
    assert computed < 60, "what moved was computed again"
    assert len(handed) == 1
    assert "Transferred" in moved.names


async def test_the_old_one_stays_until_the_router_has_heard_of_the_end() -> None:
    async with drained_at(5, spec_of(8, 40)) as (cores, stream):
        cores.old.link.holds_words = True
        await cores.move(stream)
        cores.old.engine.let_go()
        await cores.until(lambda: cores.new.engine.steps)
        leaving = asyncio.create_task(cores.old.core.drained())
        await cores.until(lambda: cores.new.engine.num_steps > 3)
        assert not leaving.done()
        cores.old.link.tell_held()
        await cores.finish(stream)
        async with asyncio.timeout(WAIT_S):
            await leaving


async def test_it_runs_on_while_it_waits_for_room() -> None:
    async with drained_at(5, spec_of(8, 40)) as (cores, stream):
        blocks = cores.new.cache.allocate(NUM_BLOCKS)
        await cores.move(stream)
        num_known = len(stream.tokens)
        cores.old.engine.let_go()
        await cores.until(lambda: len(stream.tokens) >= num_known + 10)
        cores.new.cache.pool.release(blocks)
        cores.new.core.tick()
        await cores.finish(stream)
        assert cores.new.engine.steps, "it ended where it was"


async def test_all_that_runs_leaves_at_once() -> None:
    rng = random.Random(5)
    async with TwoDecoders() as cores:
        cores.old.engine.hold()
        streams = [cores.start(spec_of(rng.randrange(3, 20), 30, salt)) for salt in range(4)]
        await cores.step_until(lambda: all(len(each.tokens) >= 4 for each in streams))
        cores.old.core.drain()
        await asyncio.gather(*map(cores.move, streams))
        cores.old.engine.let_go()
        await cores.finish(*streams)
        async with asyncio.timeout(WAIT_S):
            await cores.old.core.drained()


async def test_one_that_ends_with_a_step_in_flight_ends_there() -> None:
    async with drained_at(8, spec_of(8, 9)) as (cores, stream):
        await cores.move(stream)
        await cores.until(lambda: len(cores.new.link.handles))
        cores.old.engine.let_go()
        await cores.finish(stream)
        assert not cores.new.engine.steps


async def test_a_failed_transfer_ends_it_and_both_let_go() -> None:
    async with drained_at(5, spec_of(8, 40)) as (cores, stream):
        cores.wire.error = TransferError("the wire is cut")
        await cores.move(stream)
        cores.old.engine.let_go()
        with pytest.raises(TransferError, match="the wire is cut"):
            await stream.task
        stream.attempt.release()
        assert stream.tokens == expected_tokens(stream.spec)[: len(stream.tokens)]


async def test_one_that_is_released_while_it_moves_gives_its_blocks_back() -> None:
    async with drained_at(5, spec_of(8, 40)) as (cores, stream):
        cores.wire.open_now.clear()
        await cores.move(stream)
        cores.old.engine.let_go()
        await cores.until(lambda: cores.wire.num_opened)
        stream.task.cancel()
        stream.attempt.release()


async def test_no_token_comes_from_the_old_one_once_its_blocks_are_pushed() -> None:
    async with drained_at(5, spec_of(8, 40)) as (cores, stream):
        cores.wire.open_now.clear()
        await cores.move(stream)
        cores.old.engine.let_go()
        await cores.until(lambda: cores.wire.num_opened)
        num_steps = len(cores.old.engine.steps)
        cores.old.core.tick()
        cores.old.core.report_waits()
        await asyncio.sleep(0)
        assert len(cores.old.engine.steps) == num_steps
        cores.wire.open_now.set()
        await cores.finish(stream)


@pytest.mark.parametrize("overlap_steps", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", range(9, 14))
async def test_several_choices_go_on_with_the_kv_of_their_prompt(num_prompt_tokens: int, overlap_steps: bool) -> None:
    spec = spec_of(num_prompt_tokens, 30, n=3)
    async with drained_at(7, spec, overlap_steps=overlap_steps) as (cores, stream):
        await cores.move(stream)
        cores.old.engine.let_go()
        await cores.finish(stream)
        (moved,) = cores.old.recorded.sequences
        contexts = [seq.context_len for step in cores.new.engine.steps for seq in seqs_of(step)]
    assert "Transferred" in moved.names
    assert min(contexts) >= num_prompt_tokens, "the prompt was computed again"


@pytest.mark.parametrize("num_tokens", [1, 2, 11])
async def test_choices_that_have_ended_stay_ended_where_the_others_go(num_tokens: int) -> None:
    """Also one that ends in a step that was in flight when the others left, of which the other worker did not know."""
    for num_choices in (2, 3):
        spec = spec_of(9, 40, n=num_choices)
        ends = expected_tokens(spec, 1)[num_tokens]
        spec = replace(spec, sampling=replace(spec.sampling, end_token_ids=frozenset((ends,))))
        async with drained_at(num_tokens, spec) as (cores, stream):
            await cores.move(stream)
            cores.old.engine.let_go()
            await cores.finish(stream)
            assert cores.new.engine.steps or all(ends in each for each in stream.ids)


async def test_what_has_no_kv_fails_to_be_replayed() -> None:
    async with TwoDecoders() as cores:
        cores.old.engine.hold()
        stream = cores.start(spec_of(8, 20))
        await cores.old.engine.until_launched(1)
        (handle,) = cores.old.link.handles
        cores.old.core.move(cores.old.link, handle, Destination(frozenset((0,)), 0, b"ticket", b"endpoint"))
        cores.old.engine.let_go()
        with pytest.raises(TandemError) as failure:
            await stream.task
        stream.attempt.release()
    assert failure.value.reason is Reason.DRAINING
    assert failure.value.retryable
