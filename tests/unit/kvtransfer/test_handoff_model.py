"""Sender and receiver against a plain model, over every transport, in any interleaving that a cable allows.

About ten minutes, by hand: `pytest --hypothesis-profile long --timeout 0 tests/unit/kvtransfer/test_handoff_model.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvtransfer.base import BlockRef, Handoff, Offer, TransferReport
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from kvtransfer.transports import named
from tandem.errors import TransferError
from tandem.types import BlockId
from tests.manual_clock import ManualClock
from tests.pumped import PumpedTransport
from tests.standins.nccl import num_descriptors
from tests.transports import EVERY, PRINTS, WAYS, TestPool, make_pool

NUM_BLOCKS = 16
UNHURRIED = Timing(lease_s=60.0, reply_s=60.0, stop_s=10.0)
"""Silence is no fault here: a cable stands still for as long as no rule moves it."""
LEAVING = replace(UNHURRIED, stop_s=0.05)
"""Of the receiver, which stops when nothing more can come."""
PATIENCE_S = 30.0
SETTLE_TURNS = 10
WHICH = st.integers(0, 99)
WHAT = [*["offer"] * 6, *["open"] * 2, *["push"] * 5, *["commit"] * 4, *["wait"] * 6, *["move"] * 4]
WHAT += [*["withdraw"] * 3, *["abort"] * 2, "time", "byte", "cable", "sender"]
"""What may happen, the frequent ones several times."""
PIECES = [1000, 200, 32, 7, 1]
NUM_EXAMPLES = settings().max_examples // 4


class Blocks:
    """The owner of a pool. It writes into every block that is its own again at once, and knows what must lie there."""

    def __init__(self, pool: TestPool) -> None:
        self.pool = pool
        self.mine = {BlockId(i): self._reuse(BlockId(i), i) for i in range(NUM_BLOCKS)}
        """Blocks that are not lent, with the byte that each is full of."""
        self._next = NUM_BLOCKS

    def lend(self, count: int, which: int) -> tuple[BlockId, ...]:
        """Some that are not lent; fewer if there are not so many."""
        free = sorted(self.mine)
        chosen = tuple(free[(which + i) % len(free)] for i in range(min(count, len(free))))
        for block in chosen:
            del self.mine[block]
        return chosen

    def take_back(self, blocks: tuple[BlockId, ...]) -> None:
        """They may be used again: what still writes or reads there will show."""
        for block in blocks:
            self._next += 1
            self.mine[block] = self._reuse(block, self._next)

    def spoilt(self) -> list[BlockId]:
        """Blocks of its own that somebody else wrote into."""
        return [block for block, value in self.mine.items() if not (self.pool.blocks[block] == value).all()]

    def _reuse(self, block: BlockId, value: int) -> int:
        self.pool.blocks[block] = value % 256
        return value % 256


@dataclass
class Deal:
    """One offer and everything that both sides did with it; also its listener."""

    number: int
    targets: tuple[BlockId, ...]
    first_block: int
    blocks: Blocks
    offer: Offer | None = None
    handoff: Handoff | None = None
    expected: dict[int, torch.Tensor] = field(default_factory=dict)
    """By position: the bytes that its source block had when it was pushed."""
    calls: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What must never be; an exception in a listener would only fail its offer."""
    pushing: int = 0
    committing: bool = False
    """Whether its sender was asked to commit."""
    report: TransferReport | None = None
    given_up: bool = False
    """Whether anything was done that may fail it."""

    @property
    def payload(self) -> bytes:
        return b"first token of %d" % self.number

    @property
    def ended(self) -> bool:
        return self.calls[-1:] in (["committed"], ["writer_stopped"])

    @property
    def whole(self) -> bool:
        return len(self.expected) == len(self.targets)

    def on_receiving(self) -> None:
        self._called("receiving", [[]])

    def on_committed(self, first_token_payload: bytes) -> None:
        self._called("committed", [["receiving"]])
        if not self.committing or not self.whole or first_token_payload != self.payload:
            self.wrong.append(f"committed with {len(self.expected)} of {len(self.targets)} blocks pushed")
        for position, target in enumerate(self.targets, self.first_block):
            if not torch.equal(self.blocks.pool.blocks[target], self.expected[position]):
                self.wrong.append(f"committed with other bytes at position {position}")
        self.blocks.take_back(self.targets)

    def on_failed(self, error: TransferError) -> None:
        self._called("failed", [[], ["receiving"]])

    def on_writer_stopped(self) -> None:
        self._called("writer_stopped", [["failed"], ["receiving", "failed"]])
        self.blocks.take_back(self.targets)

    def _called(self, call: str, after: list[list[str]]) -> None:
        if self.calls not in after:
            self.wrong.append(f"{call} after {self.calls}")
        self.calls.append(call)


class Handoffs(RuleBasedStateMachine):
    """Anything may be asked of either side at any time, and nothing moves between them unless a rule says so."""

    def __init__(self, transport: str) -> None:
        super().__init__()
        self.peer_writes = WAYS[transport].peer_writes
        self.descriptors = num_descriptors()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.transport = PumpedTransport(named((transport,))[0])
        self.source, self.target = Blocks(make_pool(transport)), Blocks(make_pool(transport))
        self.receiver = KvReceiver(
            *(self.target.pool.memory, PRINTS, self.clock, (transport,), "127.0.0.1"),
            timing=LEAVING,
            known=(self.transport,),
        )
        self.held = False
        """Whether what is said stays in the cables until a rule moves it."""
        self.deals: list[Deal] = []
        self.running: set[asyncio.Task[Any]] = set()
        self.unexpected: list[str] = []
        """What ended in anything but a result or an error of the transfer."""
        self.run(self.receiver.start())
        self.sender = self.new_sender()

    def new_sender(self) -> KvSender:
        memory, name = self.source.pool.memory, self.transport.name
        return KvSender(memory, PRINTS, self.clock, name, timing=UNHURRIED, known=(self.transport,))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    def settle(self) -> None:
        """Both sides do what they can do now; what they say moves on, unless the wire is held."""

        async def turns() -> None:
            for _ in range(SETTLE_TURNS):
                for _ in range(4):
                    await asyncio.sleep(0)
                while self.transport.dialling:  # noqa: ASYNC110  names are resolved by a thread
                    await asyncio.sleep(0.0005)
                if self.held or not self.transport.move_all():
                    break

        self.run(turns())

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        async def quietly() -> Any:
            try:
                return await work
            except TransferError as error:
                return error

        task = self.loop.create_task(quietly())
        self.running.add(task)
        task.add_done_callback(self.over)
        self.settle()
        return task

    def over(self, task: asyncio.Task[Any]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.unexpected.append(repr(error))

    def pick(self, which: int, wanted: Callable[[Deal], object] = lambda deal: True) -> Deal | None:
        found = [deal for deal in self.deals if wanted(deal)]
        return found[which % len(found)] if found else None

    @rule(what=st.sampled_from(WHAT), which=WHICH, few=st.integers(0, 4), most_bytes=st.sampled_from(PIECES))
    def step(self, what: str, which: int, few: int, most_bytes: int) -> None:
        """One rule, so that what is frequent here is frequent in every example."""
        match what:
            case "offer":
                self.offer(few, which % 3, which, ("all", "all", "open", "")[which % 4])
            case "open":
                self.open(which)
            case "push":
                self.push(which, few, 1 + few, cancel=which % 4 == 3)
            case "commit":
                self.commit(which)
            case "withdraw" | "abort":
                self.give_up(which, what)
            case "wait":
                self.the_wire_and_copies_wait_or_go_on(held=bool(few & 1), waiting=bool(few & 2))
            case "move" if self.transport.cables:
                self.transport.cables[which % len(self.transport.cables)].move(few % 2, most_bytes)
            case _:
                self.something_breaks(what, which, few % 2, most_bytes)
        self.settle()

    def offer(self, count: int, first_block: int, which: int, then: str) -> None:
        """And perhaps the prefill worker does at once what it has to do, or opens it."""
        targets = self.target.lend(count, which) if self.target.mine else ()
        if not targets and not first_block:
            return
        deal = Deal(len(self.deals), targets, first_block, self.target)
        refs = tuple(BlockRef(block, deal.number) for block in targets)
        deal.offer = self.receiver.offer(refs, deal, 10.0, first_block)
        self.deals.append(deal)
        if then:
            self.begin(self.opened(deal, and_all=then == "all"))

    def open(self, which: int) -> None:
        """Perhaps not for the first time."""
        if deal := self.pick(which):
            self.begin(self.opened(deal, and_all=False))

    async def opened(self, deal: Deal, *, and_all: bool) -> None:
        assert deal.offer is not None
        handoff = await self.sender.open(deal.offer.ticket, deal.offer.endpoint, PATIENCE_S)
        assert deal.handoff is None
        deal.handoff = handoff
        if and_all:
            await self.committed(deal, handoff, deal.number)

    def push(self, which: int, skip: int, count: int, *, cancel: bool) -> None:
        deal = self.pick(which, lambda deal: deal.handoff and not deal.committing and not deal.whole)
        if deal is None or deal.handoff is None or not self.source.mine:
            return
        task = self.begin(self.pushed(deal, deal.handoff, skip, count, which))
        if cancel and not task.done():
            deal.given_up = True
            task.cancel()
            self.settle()

    async def pushed(self, deal: Deal, handoff: Handoff, skip: int, count: int, which: int) -> None:
        """Some blocks that are missing; there are some."""
        positions = range(deal.first_block, deal.first_block + len(deal.targets))
        missing = [position for position in positions if position not in deal.expected]
        first = missing[skip % len(missing)]
        room = next((i for i in range(count) if first + i not in missing), count)
        sources = self.source.lend(room, which)
        for position, block in enumerate(sources, first):
            deal.expected[position] = self.source.pool.blocks[block].clone()
        deal.pushing += 1
        try:
            await handoff.push(first, sources)
        except asyncio.CancelledError:  # then they are lent until `abort` returns
            await handoff.abort()
            raise
        finally:
            deal.pushing -= 1
            self.source.take_back(sources)

    def commit(self, which: int) -> None:
        deal = self.pick(which, lambda deal: deal.handoff and not deal.committing and not deal.pushing)
        if deal is not None and deal.handoff is not None:
            self.begin(self.committed(deal, deal.handoff, which))

    async def committed(self, deal: Deal, handoff: Handoff, which: int) -> None:
        """After the blocks that are missing, as far as there are any to push; with fewer it must fail."""
        deal.committing = True
        while not deal.whole and self.source.mine:
            await self.pushed(deal, handoff, 0, 3, which)
        deal.given_up |= not deal.whole
        deal.report = await handoff.commit(deal.payload)

    def give_up(self, which: int, how: str) -> None:
        under_way = self.pick(which, lambda deal: deal.pushing) if which % 2 else None
        deal = under_way or self.pick(which, lambda deal: not deal.ended)
        if deal is None or deal.offer is None:
            return
        deal.given_up = True
        if how == "withdraw":
            self.receiver.withdraw(deal.offer.transfer_id)
        elif deal.handoff is not None:
            self.begin(deal.handoff.abort())

    def the_wire_and_copies_wait_or_go_on(self, *, held: bool, waiting: bool) -> None:
        self.held = held
        if waiting:
            self.transport.gate.clear()
        else:
            self.transport.gate.set()

    def something_breaks(self, what: str, which: int, direction: int, most_bytes: int) -> None:
        """After it no hand-off that is open need come to a good end."""
        cable = self.transport.cables[which % len(self.transport.cables)] if self.transport.cables else None
        match what:
            case "byte" if cable:
                self.harm_all()
                cable.move(direction, most_bytes, flip=True)
            case "cable" if cable:
                self.harm_all()
                cable.cut()
            case "sender":
                self.harm_all()
                self.begin(self.sender.stop())
                for deal in self.deals:
                    deal.handoff = None
                self.sender = self.new_sender()
            case "time":
                for deal in self.deals:
                    deal.given_up |= not deal.calls  # its ticket may expire
                self.clock.advance_s(most_bytes / 50)
                self.receiver.reap()

    def harm_all(self) -> None:
        for deal in self.deals:
            deal.given_up = True

    @invariant()
    def nothing_is_wrong(self) -> None:
        wrong = [f"deal {deal.number}: {what}" for deal in self.deals for what in deal.wrong]
        assert not wrong + self.unexpected, wrong + self.unexpected
        assert (self.target.spoilt(), self.source.spoilt()) == ([], [])
        self.receiver.check_invariants()
        assert self.receiver.num_live == sum(not deal.ended for deal in self.deals)
        for deal in self.deals:
            if not deal.given_up:
                assert "failed" not in deal.calls
            if deal.report is not None:
                assert deal.calls == ["receiving", "committed"]
                assert deal.report.num_blocks == len(deal.targets)

    def teardown(self) -> None:
        self.transport.gate.set()
        try:
            self.run(self.come_to_an_end())
            self.nothing_is_wrong()
            for deal in self.deals:
                if deal.committing and not deal.given_up:
                    assert deal.calls == ["receiving", "committed"]
            self.run(self.stop())
            assert asyncio.all_tasks(self.loop) == set()
        finally:
            self.transport.close()
            self.source.pool.close()
            self.target.pool.close()
            self.loop.close()
        assert num_descriptors() <= self.descriptors

    async def come_to_an_end(self) -> None:
        """Every call that was begun returns while bytes move."""
        while self.running:
            self.transport.move_all()
            await asyncio.wait(self.running, timeout=0.001)

    async def stop(self) -> None:
        """Every offer ends, but for those whose writer never said goodbye: this process lives, so nothing proves it."""

        async def move_on() -> None:
            while True:
                self.transport.move_all()
                await asyncio.sleep(0.001)

        moving = asyncio.create_task(move_on())
        await self.sender.stop()
        unproven = self.peer_writes and any(cable.harmed for cable in self.transport.cables)
        for deal in self.deals:
            if deal.offer is not None and not deal.calls:
                self.receiver.withdraw(deal.offer.transfer_id)
            while not (deal.ended or (unproven and deal.calls[-1:] == ["failed"])):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await self.receiver.stop()
        moving.cancel()
        await asyncio.wait({moving})


@pytest.mark.parametrize("transport", EVERY)
def test_any_interleaving_ends_each_hand_off_once_with_the_right_bytes_or_none(transport: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Handoffs(transport), settings=settings(max_examples=NUM_EXAMPLES, stateful_step_count=40)
    )
