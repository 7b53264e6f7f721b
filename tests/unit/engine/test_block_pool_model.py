"""The pool against a plain model under random interleavings of requests and writers."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, PoolExhausted
from tandem.errors import InternalError
from tandem.lifecycle import BlockState
from tandem.types import BlockId

NUM_BLOCKS, BLOCK_SIZE = 12, 4


@dataclass
class Group:
    """Blocks that walk together, as a request's do; `holders` and `writing` say who holds on."""

    blocks: tuple[BlockId, ...]
    state: BlockState
    holders: int = 1
    writer_gone: bool = False
    known: bool = False
    generations: dict[BlockId, int] = field(default_factory=dict)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.groups: list[Group] = []
        self.last_generation = dict.fromkeys(range(NUM_BLOCKS), 0)

    def _groups(self, *states: BlockState) -> list[Group]:
        return [group for group in self.groups if group.state in states]

    def _pick(self, data: st.DataObject, *states: BlockState) -> Group | None:
        groups = self._groups(*states)
        return groups[data.draw(st.integers(0, len(groups) - 1))] if groups else None

    @rule(count=st.integers(0, 6), state=st.sampled_from([BlockState.LIVE, BlockState.RESERVED]))
    def allocate(self, count: int, state: BlockState) -> None:
        held = sum(len(group.blocks) for group in self.groups)
        if count > NUM_BLOCKS - held:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count, state)
            return
        blocks = self.pool.allocate(count, state)
        assert len(blocks) == count
        generations = {block: int(self.pool.generations((block,))[0]) for block in blocks}
        for block, generation in generations.items():
            assert generation > self.last_generation[block]
            self.last_generation[block] = generation
        self.groups.append(Group(blocks, state, generations=generations))

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        if group := self._pick(data, BlockState.LIVE, BlockState.CACHED):
            self.pool.retain(group.blocks)
            group.holders += 1
            group.state = BlockState.LIVE

    @rule(data=st.data(), known=st.booleans())
    def keep_or_forget(self, data: st.DataObject, known: bool) -> None:
        if group := self._pick(data, BlockState.LIVE):
            (self.pool.keep if known else self.pool.forget)(group.blocks)
            group.known = known

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if group := self._pick(data, BlockState.CACHED):
            self.pool.evict(group.blocks)
            self.groups.remove(group)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        group = self._pick(data, BlockState.LIVE, BlockState.RESERVED, BlockState.RECEIVING)
        if group is None:
            return
        self.pool.release(group.blocks)
        group.holders -= 1
        if group.holders:
            return
        if group.state is BlockState.RECEIVING and not group.writer_gone:
            group.state = BlockState.QUARANTINED
        elif group.known:
            group.state = BlockState.CACHED
        else:
            self.groups.remove(group)

    @rule(data=st.data())
    def start_receiving(self, data: st.DataObject) -> None:
        if group := self._pick(data, BlockState.RESERVED):
            self.pool.start_receiving(group.blocks)
            group.state = BlockState.RECEIVING

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        group = self._pick(data, BlockState.RECEIVING)
        if group is None:
            return
        if group.writer_gone and group.blocks:
            with pytest.raises(InternalError, match="stopped before they were verified"):
                self.pool.seal(group.blocks)
        else:
            self.pool.seal(group.blocks)
            group.state = BlockState.LIVE

    @rule(data=st.data())
    def writer_stopped(self, data: st.DataObject) -> None:
        group = self._pick(data, BlockState.QUARANTINED, BlockState.RECEIVING, BlockState.RESERVED)
        if group is None:
            return
        self.pool.writer_stopped(group.blocks)
        if group.state is BlockState.QUARANTINED:
            self.groups.remove(group)
        else:  # a RESERVED block never had a writer
            group.writer_gone = group.state is BlockState.RECEIVING

    @precondition(lambda self: all(group.state is BlockState.CACHED for group in self.groups))
    @rule()
    def idle(self) -> None:
        self.pool.assert_idle()

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        self.pool.check_invariants()
        counts = self.pool.counts()
        sizes = {state: sum(len(g.blocks) for g in self._groups(state)) for state in BlockState}
        assert (counts.reserved, counts.receiving) == (sizes[BlockState.RESERVED], sizes[BlockState.RECEIVING])
        assert (counts.live, counts.quarantined) == (sizes[BlockState.LIVE], sizes[BlockState.QUARANTINED])
        assert counts.cached == self.pool.num_cached == sizes[BlockState.CACHED]
        assert counts.free == self.pool.num_free == NUM_BLOCKS - sum(sizes.values())

    @invariant()
    def no_block_is_in_two_places_and_none_changes_under_its_holder(self) -> None:
        held = [block for group in self.groups for block in group.blocks]
        assert len(set(held)) == len(held)
        for group in self.groups:
            holders = 0 if group.state in (BlockState.QUARANTINED, BlockState.CACHED) else group.holders
            for block in group.blocks:
                assert self.pool.state(block) is group.state
                assert self.pool.ref_count(block) == holders
                assert self.pool.is_shared(block) == (holders > 1 or group.known)
                assert int(self.pool.generations((block,))[0]) == group.generations[block]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
