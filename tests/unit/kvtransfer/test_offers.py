"""The table of offers under random interleavings of owner, sender, clock and loss."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.base import BlockRef
from kvtransfer.messages import Commit, Write, digest_of
from kvtransfer.offers import OfferTable
from tandem.errors import InternalError, PeerLost, TicketRefused, TransferError
from tests.kv_ends import FAILED, RECEIVED, Recorder
from tests.manual_clock import ManualClock

NUM_BLOCKS = 12
SUMS = (11, 22, 33)


def make_table():
    clock = ManualClock()
    return OfferTable("ab" * 16, "cd" * 16, NUM_BLOCKS, clock), clock


class Owner(Recorder):
    """A decode worker: knows for each offer whether its blocks may be used again."""

    @property
    def holds_blocks(self):
        return self.calls[-1:] not in (["committed"], ["writer_stopped"])


@dataclass
class SlowWriter:
    """A sender that writes by itself; `may_write` until it says that it stopped."""

    may_write: bool = True
    asked: int = 0

    def stop_writing(self, number, error):
        self.asked += 1
        return not self.may_write


@dataclass
class Deal:
    ticket: bytes
    number: int
    blocks: tuple
    owner: Owner
    writer: SlowWriter = field(default_factory=SlowWriter)
    seq: int = 0


class Interleavings(RuleBasedStateMachine):
    """Anything may happen to any transfer at any time, dead ones included."""

    def __init__(self):
        super().__init__()
        self.table, self.clock = make_table()
        self.deals: list[Deal] = []

    def pick(self, index):
        return self.deals[index % len(self.deals)] if self.deals else None

    @rule()
    def offer(self):
        lent = {ref.block_id for deal in self.deals if deal.owner.holds_blocks for ref in deal.blocks}
        free = [i for i in range(NUM_BLOCKS) if i not in lent][:3]
        if len(free) == 3:
            blocks = tuple(BlockRef(i, len(self.deals)) for i in free)
            owner = Owner()
            ticket = self.table.mint(blocks, owner, 5.0)
            self.deals.append(Deal(ticket.encode(), ticket.number, blocks, owner))

    @rule(index=st.integers(0, 99))
    def show(self, index):
        if deal := self.pick(index):
            fresh = deal.owner.calls == []
            try:
                self.table.show(deal.number, deal.ticket, deal.writer)
                assert fresh
            except TicketRefused:
                assert deal.owner.calls != [] or not fresh

    @rule(index=st.integers(0, 99), first=st.integers(0, 3), spoil=st.booleans())
    def write(self, index, first, spoil):
        if deal := self.pick(index):
            write = Write(first, SUMS[first:] or (1,))
            if self.table.claim(deal.number, deal.seq, write) is not None:
                deal.seq += 1
                found = tuple(each ^ spoil for each in write.checksums)
                assert self.table.verify(deal.number, write, found) is not spoil

    @rule(index=st.integers(0, 99))
    def commit(self, index):
        if deal := self.pick(index):
            try:
                self.table.commit(deal.number, Commit(deal.seq, digest_of(SUMS), b""))
                assert deal.owner.calls == RECEIVED
            except TransferError:
                pass

    @rule(index=st.integers(0, 99))
    def withdraw(self, index):
        if deal := self.pick(index):
            self.table.withdraw(f"{deal.number:016x}")
            assert deal.owner.calls[-1] in {"committed", "failed", "writer_stopped"}

    @rule(index=st.integers(0, 99))
    def lose_peer(self, index):
        if (deal := self.pick(index)) and deal.owner.calls[:1] == ["receiving"]:
            self.table.fail(deal.number, PeerLost("gone"))

    @rule(index=st.integers(0, 99))
    def writer_says_it_stopped(self, index):
        if (deal := self.pick(index)) and deal.owner.calls[:1] == ["receiving"]:
            deal.writer.may_write = False
            self.table.fail(deal.number, TransferError("gave up"))
            self.table.writer_stopped(deal.number)
            assert not deal.owner.holds_blocks

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds):
        self.clock.advance_s(seconds)
        self.table.reap()

    @invariant()
    def blocks_return_only_after_their_writer_let_go(self):
        for deal in self.deals:
            if deal.owner.calls == FAILED:
                committed_badly = deal.writer.may_write and deal.writer.asked == 0
                assert committed_badly or not deal.writer.may_write

    @invariant()
    def the_table_holds_exactly_what_owners_still_lend(self):
        self.table.check_invariants()
        assert len(self.table) == sum(deal.owner.holds_blocks for deal in self.deals)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("block_ids", [(), (0, 0), (12,), (-1,)])
def test_an_owner_that_offers_blocks_it_cannot_is_our_own_bug(block_ids):
    table, _ = make_table()
    with pytest.raises(InternalError):
        table.mint(tuple(BlockRef(i, 0) for i in block_ids), Owner(), 1.0)
    assert len(table) == 0


def test_blocks_under_a_live_writer_cannot_be_offered_again():
    table, _ = make_table()
    ticket = table.mint((BlockRef(1, 0),), Owner(), 1.0)
    writer = SlowWriter()
    table.show(ticket.number, ticket.encode(), writer)
    table.withdraw(ticket.transfer_id)
    with pytest.raises(InternalError, match="may still write"):
        table.mint((BlockRef(1, 1),), Owner(), 1.0)
    table.writer_stopped(ticket.number)
    table.mint((BlockRef(1, 1),), Owner(), 1.0)
