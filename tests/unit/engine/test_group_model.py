"""Groups over one pool, against a memory that remembers what was written where, under random interleavings.

The memory holds in each slot the tokens up to its position, by which any read of KV that is not one's own shows.
Steps are carried out when they are launched, as a device does in order; their tokens are seen later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, PoolExhausted
from engine.group import Group
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from tandem.first_tokens import NextTokens, decode_first_tokens, encode_first_tokens
from tandem.types import BlockId, ChoiceSpec, FinishReason, GroupSpec, RequestId, SamplingParams, TokenId
from tests.decode_rows import rows_of

NUM_BLOCKS, BLOCK_SIZE = 20, 3
END = TokenId(99)


@dataclass
class InFlight:
    """A launched seq and who drew from it; `tokens` will be seen when it is collected."""

    group: Group
    seq: Sequence
    drawers: tuple[Sequence, ...]
    num_tokens: int
    tokens: list[TokenId]


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.groups: list[Group] = []
        self.in_flight: list[InFlight] = []
        self.memory: dict[tuple[BlockId, int], tuple[TokenId, ...]] = {}
        self.drawn: dict[int, list[TokenId]] = {}
        self.held_outside: list[BlockId] = []

    @precondition(lambda self: len(self.groups) < 3)
    @rule(length=st.integers(1, 5), count=st.integers(1, 4), resumed=st.integers(0, 3), most=st.integers(1, 6))
    def admit(self, length: int, count: int, resumed: int, most: int) -> None:
        prompt = tuple(TokenId(n) for n in range(length))
        choices = tuple(
            ChoiceSpec(n, tuple(TokenId(50 + n) for _ in range(min(resumed, most - 1) if n % 2 else 0)))
            for n in range(count)
        )
        group = Group(GroupSpec(RequestId("r"), prompt, SamplingParams(max_tokens=most), choices))
        self.groups.append(group)
        for each in group.sequences:
            self.drawn[id(each)] = list(each.output_token_ids)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), whole=st.booleans())
    def launch(self, data: st.DataObject, whole: bool) -> None:
        """Some tokens of each seq of a group, behind what it has in flight; it forks first if that is due."""
        group = self.groups[data.draw(st.integers(0, len(self.groups) - 1), "group")]
        if not group.is_forked and group.prefix.num_computed_tokens >= len(group.spec.prompt_token_ids):
            group.fork(self.pool)
        for seq in group.running:
            is_row = group.is_forked and seq.num_remaining_tokens == 1
            if not seq.is_exhausted and seq.num_remaining_tokens and (is_row or not seq.num_pending_tokens):
                count = seq.num_remaining_tokens
                self._launch(data, group, seq, count if whole else data.draw(st.integers(1, count), "tokens"))

    def _launch(self, data: st.DataObject, group: Group, seq: Sequence, num_tokens: int) -> None:
        needs = seq.blocks_wanted(num_tokens, BLOCK_SIZE) + group.needs_copy(seq, self.pool)
        if needs > self.pool.num_free:
            return
        copies = group.copy_on_write(seq, PrefixCache(self.pool))
        seq.add_blocks(self.pool.allocate(seq.blocks_wanted(num_tokens, BLOCK_SIZE)))
        first, drawers, draws = seq.num_computed_tokens, seq.drawers, num_tokens == seq.num_remaining_tokens
        if seq.num_pending_tokens:
            rows_of((seq,), [0])
        else:
            seq.schedule(num_tokens)
        for copy in copies:
            for slot in range(BLOCK_SIZE):
                self.memory[copy.target, slot] = self.memory.get((copy.source, slot), ())
        for at in range(first, first + num_tokens):
            block = seq.block_table[at // BLOCK_SIZE]
            assert not self.pool.is_shared(block), "a writer writes a shared block"
            self.memory[block, at % BLOCK_SIZE] = self._history(group, seq)[: at + 1]
        tokens = [self._draw(data) for _ in drawers] if draws else []
        for drawer, token in zip(drawers if tokens else (), tokens, strict=True):
            self.drawn[id(drawer)].append(token)
        self.in_flight.append(InFlight(group, seq, drawers if tokens else (), num_tokens, tokens))

    @precondition(lambda self: self.in_flight)
    @rule(count=st.integers(1, 6))
    def collect(self, count: int) -> None:
        """The oldest steps' tokens are seen; what came after an end is rolled back."""
        for _ in range(min(count, len(self.in_flight))):
            if self.in_flight:
                self._collect()

    def _collect(self) -> None:
        ended = self.in_flight.pop(0)
        for drawer, token in zip(ended.drawers, ended.tokens, strict=True):
            if drawer.append_token(token) is FinishReason.STOP:
                later = [each for each in self.in_flight if each.seq is drawer]
                drawer.roll_back(sum(each.num_tokens for each in later), drawer.num_pending_tokens)
                self.in_flight = [each for each in self.in_flight if each.seq is not drawer]
                self.drawn[id(drawer)] = list(drawer.output_token_ids)
            if drawer.is_finished:
                self.pool.release(drawer.take_blocks())

    @precondition(lambda self: any(group.holds_blocks for group in self.groups))
    @rule(data=st.data())
    def hold_from_outside(self, data: st.DataObject) -> None:
        """As a cache's next user would."""
        held = [b for group in self.groups for each in self._holders(group) for b in each.block_table]
        block = held[data.draw(st.integers(0, len(held) - 1), "block")]
        self.pool.retain((block,))
        self.held_outside.append(block)

    @precondition(lambda self: any(not self._is_in_flight(group) for group in self.groups))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        settled = [group for group in self.groups if not self._is_in_flight(group)]
        group = settled[data.draw(st.integers(0, len(settled) - 1), "group")]
        num_free = self.pool.num_free + group.num_own_blocks(self.pool)
        self._release(group)
        assert self.pool.num_free == num_free
        assert not group.holds_blocks

    @precondition(lambda self: any(self._may_move(group) for group in self.groups))
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """A running group goes on in another one, as on another worker, which knows some of each choice's tokens."""
        old = next(group for group in self.groups if self._may_move(group))
        going = data.draw(st.lists(st.sampled_from(old.sequences), min_size=1, unique=True), "choices")
        bearer = next((each for each in going if not each.is_finished), None)
        if bearer is None:
            return
        known = {each: data.draw(st.integers(0, each.num_output_tokens - 1), "known") for each in going}
        choices = tuple(
            ChoiceSpec(each.index, each.output_token_ids[: known[each]]) for each in old.sequences if each in known
        )
        num_before = min(known.values())
        new = Group(replace(old.spec, choices=choices))
        num_blocks = new.prefix.blocks_wanted(new.prefix.num_tokens, BLOCK_SIZE)
        if num_blocks > self.pool.num_free:
            return
        blocks = self.pool.allocate(num_blocks)
        for source, target in zip(bearer.block_table[:num_blocks], blocks, strict=True):
            for slot in range(BLOCK_SIZE):
                self.memory[target, slot] = self.memory.get((source, slot), ())
        tokens = NextTokens({each.index: each.output_token_ids[num_before:] for each in going})
        new.land(blocks, decode_first_tokens(encode_first_tokens(tokens)), self.pool)
        for each in new.sequences:
            (same,) = (one for one in going if one.index == each.index)
            assert each.output_token_ids == same.output_token_ids
            assert each.finish_reason == same.finish_reason
            self.drawn[id(each)] = list(each.output_token_ids)
        self._release(old)
        self.groups[self.groups.index(old)] = new

    @precondition(lambda self: self.groups and all(group.is_finished for group in self.groups))
    @rule()
    def end_all(self) -> None:
        self.teardown()

    def teardown(self) -> None:
        self.in_flight.clear()
        for group in self.groups:
            self._release(group)
        self.groups.clear()
        for block in self.held_outside:
            self.pool.release((block,))
        self.held_outside.clear()
        self.pool.assert_idle()

    @invariant()
    def each_block_has_its_holders(self) -> None:
        self.pool.check_invariants()
        holders = Counter(self.held_outside)
        holders.update(b for group in self.groups for each in self._holders(group) for b in each.block_table)
        for block in range(NUM_BLOCKS):
            assert self.pool.ref_count(BlockId(block)) == holders[BlockId(block)]

    @invariant()
    def each_seq_reads_its_own_tokens(self) -> None:
        for group in self.groups:
            for seq in self._holders(group):
                history = self._history(group, seq)
                for at in range(seq.num_computed_tokens if len(seq.block_table) else 0):
                    slot = (seq.block_table[at // BLOCK_SIZE], at % BLOCK_SIZE)
                    assert self.memory[slot] == history[: at + 1]

    def _draw(self, data: st.DataObject) -> TokenId:
        return TokenId(data.draw(st.sampled_from([60, 61, 62, END]), "token"))

    def _history(self, group: Group, seq: Sequence) -> tuple[TokenId, ...]:
        return (*group.spec.prompt_token_ids, *self.drawn.get(id(seq), ()))

    def _holders(self, group: Group) -> set[Sequence]:
        return {group.prefix, *group.sequences}

    def _may_move(self, group: Group) -> bool:
        ready = not self._is_in_flight(group) and group.is_forked and not group.is_finished
        return ready and all(each.num_remaining_tokens == 1 and each.num_output_tokens for each in group.running)

    def _is_in_flight(self, group: Group) -> bool:
        return any(each.group is group for each in self.in_flight)

    def _release(self, group: Group) -> None:
        for table in group.take_blocks():
            self.pool.release(table)


TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_a_pool_without_room_leaves_the_shared_block_as_it_is() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    params = SamplingParams(max_tokens=4)
    group = Group(GroupSpec(RequestId("r"), (TokenId(1),), params, (ChoiceSpec(0), ChoiceSpec(1))))
    group.land(pool.allocate(1), {0: TokenId(2), 1: TokenId(3)}, pool)
    held = pool.allocate(1)
    with pytest.raises(PoolExhausted):
        group.copy_on_write(group.sequences[0], PrefixCache(pool))
    assert group.sequences[0].block_table[0] == group.sequences[1].block_table[0]
    pool.release(held)
