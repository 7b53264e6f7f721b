"""A cache with tiers against a plain model: every block carries the name of what was computed in it.

The name goes with the block through steps that move it, peers that write it and steps that fail. What the cache counts
on must have the right name at any time, whatever was evicted, moved, forgotten or repeated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, PoolExhausted
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache
from engine.prefix_tree import Tier, decode
from engine.step import Direction, TierMove
from tandem.lifecycle import BlockState

NUM_BLOCKS, NUM_ROWS, SIZE = 8, 3, 2
GARBAGE = "garbage"
SALTS = st.sampled_from(["", "one"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


def names(salt, tokens):
    """What full blocks of these tokens hold."""
    return [(salt, tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]


@dataclass(eq=False)
class Request:
    salt: str
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    num_found: int
    in_flight: int = 0
    is_computed: bool = False


@dataclass(eq=False)
class Step:
    moves: tuple[TierMove, ...]
    requests: list[Request]
    fails: bool
    has_run: bool = False
    released: list[Request] = field(default_factory=list)
    """Blocks that wait for its end."""

    @property
    def loads(self):
        return any(move.direction is Direction.IN for move in self.moves)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.cache = PrefixCache(self.pool, tier=HostTier(NUM_ROWS, 1))
        self.content: dict[int, object] = {}
        self.rows: dict[int, object] = {}
        self.requests: list[Request] = []
        self.steps: deque[Step] = deque()
        self.receiving: list[tuple[Request, list[object]]] = []

    def _pick(self, data, choices):
        return choices[data.draw(st.integers(0, len(choices) - 1))] if choices else None

    # --- requests ---

    @rule(salt=SALTS, tokens=TOKENS, data=st.data())
    def start(self, salt, tokens, data) -> None:
        available, expected = self.cache.num_available, self.cache.match(salt, tokens)
        from_block = data.draw(st.integers(0, 1))
        found = self.cache.acquire(salt, tokens, from_block)
        assert len(found) <= max(0, expected // SIZE - from_block)
        assert self.cache.num_available >= available - len(found)
        assert len(found) * SIZE < len(tokens)
        wanted = names(salt, tokens)[from_block:]
        loaded = found[: self.cache.num_loaded(found)]
        assert [self.content[block] for block in loaded] == wanted[: len(loaded)]
        if from_block or data.draw(st.booleans()):
            self.pool.release(found)
            return
        try:
            own = self.cache.allocate(-(-len(tokens) // SIZE) - len(found))
        except PoolExhausted:
            self.pool.release(found)
        else:
            self.requests.append(Request(salt, tokens, found + own, len(found)))

    @rule(data=st.data())
    def finish(self, data) -> None:
        if request := self._pick(data, self.requests):
            self._release(request)

    def _release(self, request) -> None:
        self.requests.remove(request)
        if request.in_flight:
            self.steps[-1].released.append(request)
        else:
            self.pool.release(request.blocks)

    @rule(salt=SALTS, tokens=TOKENS)
    def receive(self, salt, tokens) -> None:
        available, num_blocks = self.cache.num_available, -(-len(tokens) // SIZE)
        if num_blocks > available:
            with pytest.raises(PoolExhausted):
                self.cache.allocate(num_blocks, BlockState.RESERVED)
            return
        blocks = self.cache.allocate(num_blocks, BlockState.RESERVED)
        self.pool.start_receiving(blocks)
        written = [*names(salt, tokens), *(("part", tokens) for _ in range(len(tokens) % SIZE))]
        self.content.update(zip(blocks, written, strict=True))
        self.receiving.append((Request(salt, tokens, blocks, 0, is_computed=True), written))

    @rule(data=st.data())
    def land(self, data) -> None:
        if landed := self._pick(data, self.receiving):
            self.receiving.remove(landed)
            request, written = landed
            assert [self.content[block] for block in request.blocks] == written
            self.pool.seal(request.blocks)
            self.cache.insert(request.salt, request.tokens, request.blocks)
            self.requests.append(request)

    @rule(salt=SALTS, tokens=TOKENS)
    def forget(self, salt, tokens) -> None:
        self.cache.forget(salt, tokens)
        assert self.cache.match(salt, (*tokens, 0)) == 0

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.match("", (0, 0, 0)) == 0

    @rule(state=st.sampled_from([BlockState.LIVE, BlockState.RESERVED]))
    def give_all_that_is_available(self, state) -> None:
        blocks = self.cache.allocate(self.cache.num_available, state)
        if state is BlockState.RESERVED:
            with pytest.raises(PoolExhausted):
                self.cache.allocate(1, state)
            self.content.update(dict.fromkeys(blocks, GARBAGE))
        self.pool.release(blocks)

    # --- steps ---

    @precondition(lambda self: len(self.steps) < 2)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def launch_step(self, data, fails) -> None:
        waiting = [each for each in self.requests if not each.in_flight]
        chosen = [each for each in waiting if data.draw(st.booleans())]
        if self.steps:
            fails |= self.steps[-1].fails and self.steps[-1].loads  # as the engine thread sees to
        for each in chosen:
            each.in_flight += 1
        self.steps.append(Step(self.cache.take_moves(), chosen, fails))

    @rule()
    def run_step(self) -> None:
        step = next((each for each in self.steps if not each.has_run), None)
        if step is None:
            return
        step.has_run = True
        for direction in (Direction.OUT, Direction.IN):
            for move in step.moves:
                if move.direction is direction is Direction.OUT:
                    self.rows[move.row] = GARBAGE if step.fails else self.content.get(move.block, GARBAGE)
                elif move.direction is direction:
                    self.content[move.block] = GARBAGE if step.fails else self.rows[move.row]
        for request in step.requests:
            full = names(request.salt, request.tokens)
            if not step.fails:
                assert [self.content[block] for block in request.blocks[: request.num_found]] == full[
                    : request.num_found
                ]
            if not request.is_computed:
                written = [*full[request.num_found :], ("part", request.tokens)]
                for block, name in zip(request.blocks[request.num_found :], written, strict=False):
                    self.content[block] = GARBAGE if step.fails else name

    @precondition(lambda self: self.steps)
    @rule()
    def end_step(self) -> None:
        while not self.steps[0].has_run:
            self.run_step()
        step = self.steps.popleft()
        self.cache.step_ended(failed=step.fails)
        for request in step.requests:
            request.in_flight -= 1
            if request not in self.requests:
                continue
            if step.fails:
                self._release(request)
            else:
                request.is_computed, request.num_found = True, len(request.blocks) - bool(len(request.tokens) % SIZE)
                self.cache.insert(request.salt, request.tokens, request.blocks)
        for request in step.released:
            self.pool.release(request.blocks)

    # --- what must hold ---

    @invariant()
    def the_cache_agrees_with_itself(self) -> None:
        self.cache.check_invariants()
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.live + counts.reserved + counts.receiving == NUM_BLOCKS

    @invariant()
    def what_it_counts_on_has_the_right_name(self) -> None:
        tree, rows = self.cache._tree, self.cache._rows
        for node in tree.nodes():
            above, edges = node, []
            while above.parent is not None:
                edges.insert(0, above.edge)
                above = above.parent
            tokens = tuple(decode(b"".join(edges)))
            wanted = names(tree._salts[above], tokens)[-len(node.places) :]
            for place, name in zip(node.places, wanted, strict=True):
                if node.tier is Tier.DEVICE and not rows.is_loading(place):
                    assert self.content[place] == name
                elif node.tier is Tier.HOST and rows.is_ready(place):
                    assert self.rows[place] == name

    def teardown(self) -> None:
        while self.steps:
            self.end_step()
        for request in [*self.requests, *(request for request, _ in self.receiving)]:
            self.pool.release(request.blocks)
            if self.pool.state(request.blocks[0]) is BlockState.QUARANTINED:
                self.pool.writer_stopped(request.blocks)
        self.requests.clear()
        self.launch_last()
        self.pool.assert_idle()
        self.cache.clear()
        self.cache.check_invariants()
        assert self.pool.num_free == NUM_BLOCKS
        assert self.cache._rows.num_free == NUM_ROWS

    def launch_last(self) -> None:
        self.steps.append(Step(self.cache.take_moves(), [], fails=False))
        self.end_step()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
