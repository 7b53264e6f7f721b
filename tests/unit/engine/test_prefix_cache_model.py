"""A cache with tiers against a plain model: every block carries the name of what was computed in it.

The name goes with the block through steps that move it, peers that write it, steps that fail, and a disk that is late,
gives back other bytes or fails. What the cache counts on must have the right name at any time, whatever was evicted,
moved, forgotten or repeated.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, PoolExhausted
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache
from engine.prefix_tree import Tier
from engine.step import Direction, TierMove
from tandem.lifecycle import BlockState
from tests.fake_disk import OTHER_BYTES as GARBAGE
from tests.fake_disk import FakeDisk

NUM_BLOCKS, NUM_ROWS, NUM_SLOTS, SIZE = 8, 3, 3, 2
SALTS = st.sampled_from(["", "one"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)

CONVERSATIONS = ((0, 0, 1, 1, 0, 1, 0), (0, 0, 1, 1, 1, 1, 0))
TURNS = st.builds(lambda said, end: said[:end], st.sampled_from(CONVERSATIONS), st.integers(3, 7))
RNG = st.randoms(use_true_random=False)


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
    has_disk = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.content: dict[int, object] = {}
        self.rows: dict[int, object] = {}
        self.disk = FakeDisk(NUM_SLOTS, self.rows)
        disk = self.disk if self.has_disk else None
        self.cache = PrefixCache(self.pool, tier=HostTier(NUM_ROWS, 1), disk=disk)
        self.cache._evictor._num_rows_ahead = 2
        self.requests: list[Request] = []
        self.steps: deque[Step] = deque()
        self.receiving: list[tuple[Request, list[object]]] = []

    def _pick(self, rng, choices):
        return rng.choice(choices) if choices else None

    # --- requests ---

    @rule(salt=SALTS, tokens=TOKENS, rng=RNG)
    def start(self, salt, tokens, rng) -> None:
        available, expected = self.cache.num_available, self.cache.match(salt, tokens)
        from_block = rng.randint(0, 1)
        found = tuple(self.cache.acquire(salt, tokens, from_block))
        assert len(found) <= max(0, expected // SIZE - from_block)
        assert self.cache.num_available >= available - len(found)
        assert len(found) * SIZE < len(tokens)
        wanted = names(salt, tokens)[from_block:]
        loaded = found[: self.cache.num_loaded(found)]
        assert [self.content[block] for block in loaded] == wanted[: len(loaded)]
        if from_block or rng.choice((True, False)):
            self.pool.release(found)
            return
        try:
            own = self.cache.allocate(-(-len(tokens) // SIZE) - len(found))
        except PoolExhausted:
            self.pool.release(found)
        else:
            self.requests.append(Request(salt, tokens, found + own, len(found)))

    @rule(rng=RNG)
    def finish(self, rng) -> None:
        if request := self._pick(rng, self.requests):
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

    @rule(rng=RNG)
    def land(self, rng) -> None:
        if landed := self._pick(rng, self.receiving):
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
    @rule(rng=RNG, fails=st.sampled_from([False, False, True]))
    def launch_step(self, rng, fails) -> None:
        waiting = [each for each in self.requests if not each.in_flight]
        chosen = [each for each in waiting if rng.choice((True, False))]
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

    @rule(salt=SALTS, tokens=TURNS, waits=st.booleans(), makes_room=st.booleans())
    def serve(self, salt, tokens, waits, makes_room) -> None:
        """A request from its start to its end, that may wait for the disk first; `makes_room`: in a pool from which all
        that nobody holds has gone.
        """
        while self.steps:
            self.end_step()
        self.cache.prefetch(salt, tokens)
        while waits and self.disk.jobs:
            self.disk.work("well")
        if makes_room:
            self.give_all_that_is_available(BlockState.LIVE)
            self._make_step([])
        found = tuple(self.cache.acquire(salt, tokens))
        try:
            own = self.cache.allocate(-(-len(tokens) // SIZE) - len(found))
        except PoolExhausted:
            self.pool.release(found)
            return
        request = Request(salt, tokens, found + own, len(found), in_flight=1)
        self.requests.append(request)
        self._make_step([request])
        self._release(request)

    def _make_step(self, requests) -> None:
        self.steps.append(Step(self.cache.take_moves(), requests, fails=False))
        self.end_step()

    # --- what must hold ---

    @invariant()
    def the_cache_agrees_with_itself(self) -> None:
        self.cache.check_invariants()
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.live + counts.reserved + counts.receiving == NUM_BLOCKS

    @invariant()
    def what_it_counts_on_has_the_right_name(self) -> None:
        tree, host, disk = self.cache._tree, self.cache._host, self.cache._disk
        for node in tree.nodes():
            above, edges = node, []
            while above.parent is not None:
                edges.insert(0, above.edge)
                above = above.parent
            tokens = tuple(array("I", b"".join(edges)))
            wanted = names(tree._salts[above], tokens)[-len(node.places) :]
            for place, name in zip(node.places, wanted, strict=True):
                if node.tier is Tier.DEVICE and not host.is_loading(place):
                    assert self.content[place] == name
                elif node.tier is Tier.HOST and host.rows.is_ready(place):
                    assert self.rows[place] == name
                elif node.tier is Tier.DISK and disk.slots.is_ready(place):
                    assert self.disk.slots[place] == name

    def teardown(self) -> None:
        while self.steps:
            self.end_step()
        for request in [*self.requests, *(request for request, _ in self.receiving)]:
            self.pool.release(request.blocks)
            if self.pool.state(request.blocks[0]) is BlockState.QUARANTINED:
                self.pool.writer_stopped(request.blocks)
        self.requests.clear()
        while self.disk.jobs:
            self.disk.work("well")
        self._make_step([])
        self.pool.assert_idle()
        self.cache.clear()
        self.cache.check_invariants()
        assert self.pool.num_free == NUM_BLOCKS
        while self.disk.jobs:
            self.disk.work("well")
        self.cache.take_moves()
        assert self.cache._host.rows.num_free == NUM_ROWS
        assert not self.has_disk or self.cache._disk.slots.num_free == NUM_SLOTS


class DiskMachine(CacheMachine):
    has_disk = True

    @rule(salt=SALTS, tokens=TOKENS)
    def prefetch(self, salt, tokens) -> None:
        self.cache.prefetch(salt, tokens)

    @rule(outcome=st.sampled_from(["well"] * 6 + ["other bytes", "error"]))
    def work(self, outcome) -> None:
        self.disk.work(outcome)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def do_something(machine, rng, outcome) -> None:
    salt, said = rng.choice(("", "one")), rng.choice(CONVERSATIONS)[: rng.randint(3, 7)]
    operations = [
        lambda: machine.serve(salt, said, rng.random() < 0.7, rng.random() < 0.7),
        lambda: machine.serve(salt, said, rng.random() < 0.7, rng.random() < 0.7),
        lambda: machine.start(salt, said, rng),
        lambda: machine.finish(rng),
        lambda: machine.prefetch(salt, said),
        lambda: machine.work(outcome),
        lambda: machine.end_step() if machine.steps else None,
        lambda: machine.launch_step(rng, rng.random() < 0.1) if len(machine.steps) < 2 else None,
        lambda: machine.receive(salt, said) if rng.random() < 0.3 else machine.land(rng),
        lambda: machine.forget(salt, said) if rng.random() < 0.1 else None,
    ]
    rng.choice(operations)()


@pytest.mark.parametrize("seed", range(4))
def test_conversations_that_come_back_over_and_over(seed) -> None:
    """As the machine above, but on few paths, so that much goes to disk and comes back; in the end the disk fails."""
    rng, machine = random.Random(seed), DiskMachine()
    for number in range(2000):
        lies = rng.random() < 0.1
        do_something(machine, rng, "error" if number > 1500 else "other bytes" if lies else "well")
        machine.the_cache_agrees_with_itself()
        machine.what_it_counts_on_has_the_right_name()
    counters = machine.cache.counters
    assert counters.disk_stored_blocks > counters.disk_loaded_blocks > 10
    assert counters.disk_failed_blocks
    machine.teardown()
