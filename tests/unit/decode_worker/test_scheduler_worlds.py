"""The step planner: rules in random worlds of real groups, a real pool and its cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.scheduler import StepPlan, StepPlanner
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from engine.step import ScheduledSeq
from tandem.types import TokenId
from tests.asked import END, Asked, asked, leave_free
from worker.admission import Forecast, note_overtaken
from worker.tuning import MAX_OVERTAKES


@dataclass
class World:
    """A pool and its requests, driven by plans only. All tokens but ends are equal, so that nearly all KV is known."""

    cache: PrefixCache
    max_seqs: int
    chunk_tokens: int
    rng: random.Random
    growth: Forecast
    running: list[Asked] = field(default_factory=list)
    waiting: list[Asked] = field(default_factory=list)

    @property
    def pool(self) -> BlockPool:
        return self.cache.pool

    def arrive(self, request: Asked, *, by_handoff: bool) -> None:
        """A hand-off brings its blocks, if there are any free; else the prompt is computed here."""
        prefix, size = request.group.prefix, self.pool.block_size
        if by_handoff and -(-prefix.num_tokens // size) <= self.cache.num_available:
            request.group.attach(self.cache)
            blocks = self.cache.allocate(prefix.blocks_wanted(prefix.num_remaining_tokens, size))
            first = {choice.index: TokenId(1) for choice in prefix.drawers}
            self.cache.insert("", prefix.token_ids, (*prefix.block_table, *blocks))
            request.group.land(blocks, first, self.pool)
            request.group.follow(self.cache)
        if request.group.is_finished:
            self.release(request)
        else:
            self.waiting.append(request)

    def step(self) -> StepPlan:
        self.running.sort(key=lambda request: request.rank)
        self.waiting.sort(key=lambda request: request.rank)
        plan = self.plan()
        attached = [each.group.attach(self.cache) for each in plan.admitted if not each.group.holds_blocks]
        if any(attached):
            plan = self.plan()
        self.check(plan)
        self.carry_out(plan)
        self.pool.check_invariants()
        return plan

    def plan(self) -> StepPlan:
        sizes = {"max_seqs": self.max_seqs, "chunk_tokens": self.chunk_tokens}
        return StepPlanner(self.running, self.waiting, self.cache, self.growth, **sizes).plan()

    def check(self, plan: StepPlan) -> None:
        seqs = [seq for _, seq, _ in plan.scheduled]
        assert len(seqs) == len(set(seqs)) <= self.max_seqs
        assert set(plan.admitted) <= set(self.waiting)
        ranks = [request.rank for request, _, _ in plan.scheduled]
        assert {r for r, _, _ in plan.scheduled} <= {*self.running, *plan.admitted} - set(plan.preempted)
        for victim in plan.preempted:
            assert victim.group.holds_blocks or not ranks
            ahead = ranks or [request.rank for request in self.waiting if request.group.holds_blocks]
            assert min(ahead) < victim.rank, "nobody gained from a preemption"
        assert sum(n for _, seq, n in plan.scheduled if seq.num_remaining_tokens > 1) <= self.chunk_tokens
        assert all(1 <= n <= seq.num_remaining_tokens for _, seq, n in plan.scheduled)

    def carry_out(self, plan: StepPlan) -> None:
        """The pool raises if more blocks are taken than there are."""
        for request in plan.admitted:
            self.waiting.remove(request)
            self.running.append(request)
        note_overtaken(self.waiting, plan.admitted)
        for request in plan.preempted:
            self.release(request)
            if request in self.running:
                self.running.remove(request)
                self.waiting.append(request)
        assert sum(request.group.num_seats for request in self.running) <= self.max_seqs
        schedules: list[ScheduledSeq] = []
        for request, seq, num_tokens in plan.scheduled:
            request.group.copy_on_write(seq, self.cache)
            seq.add_blocks(self.cache.allocate(seq.blocks_wanted(num_tokens, self.pool.block_size)))
            schedules.append(seq.schedule(num_tokens))
        for (request, seq, _), scheduled in zip(plan.scheduled, schedules, strict=True):
            seq.step_ended(scheduled)
            self.take(request, seq)

    def take(self, request: Asked, seq: Sequence) -> None:
        group = request.group
        group.remember_sequence(seq, self.cache)
        drawers = [choice for choice in seq.drawers if choice.num_pending_tokens]
        ends_prefix = not group.is_forked and (bool(drawers) or not seq.num_remaining_tokens)
        for choice in drawers:
            choice.append_token(END if self.rng.random() < 0.05 else TokenId(1))
            if group.is_forked and choice.is_finished:
                self.pool.release(choice.take_blocks())
        if ends_prefix:
            group.fork(self.pool)
            group.follow(self.cache)
        if group.is_finished:
            self.release(request)
            self.running.remove(request)
            for choice in group.sequences:
                self.growth.completed(choice.num_output_tokens)

    def release(self, request: Asked) -> None:
        request.group.remember(self.cache)
        for table in request.group.take_blocks():
            self.pool.release(table)


Arriving = tuple[int, Asked, bool]
"""After how many steps, who, and whether as a hand-off."""


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[Arriving]]:
    """A world, and who arrives after how many steps. Each group alone fits."""
    pool = BlockPool(draw(st.integers(6, 24)), draw(st.sampled_from([1, 2, 4, 16])))
    size, total, max_seqs = pool.block_size, pool.num_blocks, draw(st.integers(1, 6))
    chunk_tokens = draw(st.integers(1, 40))
    growth = Forecast(pool, draw(st.sampled_from([1, 8, 32])))
    arrivals: list[Arriving] = []
    step = 0
    for number in range(draw(st.integers(1, 12))):
        step += draw(st.integers(0, 5))
        n = draw(st.integers(1, min(max_seqs, total - 1)))
        num_prompt_tokens = draw(st.integers(1, min(3 * size, (total - n) * size)))
        shared = num_prompt_tokens // size
        max_tokens = draw(st.integers(1, (shared + (total - shared) // n) * size - num_prompt_tokens))
        emitted = draw(st.sampled_from([0, draw(st.integers(0, max_tokens - 1))]))
        priority = draw(st.sampled_from([0, 0, 0, 1]))
        each = asked(number, num_prompt_tokens, n=n, max_tokens=max_tokens, priority=priority, emitted=emitted)
        each.num_overtaken = draw(st.sampled_from([0, MAX_OVERTAKES]))
        assert each.group.spec.max_pool_tokens(size) <= total * size
        arrivals.append((step, each, draw(st.booleans())))
    cache, rng = PrefixCache(pool, enabled=draw(st.booleans())), random.Random(draw(st.integers(0, 99)))
    return World(cache, max_seqs, chunk_tokens, rng, growth), arrivals


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_every_group_ends_whatever_arrives_when(case: tuple[World, list[Arriving]]) -> None:
    world, arrivals = case
    num_tokens = sum(len(a.group.sequences) * a.group.spec.max_total_tokens for _, a, _ in arrivals)
    for step in range(50 + 40 * num_tokens):
        for at, request, by_handoff in arrivals:
            if at == step:
                world.arrive(request, by_handoff=by_handoff)
        holders = [request for request in (*world.running, *world.waiting) if request.group.holds_blocks]
        first = min(holders, key=lambda request: request.rank, default=None)
        plan = world.step()
        progressed = plan.scheduled or plan.preempted or not (world.running or world.waiting)
        assert progressed, "nobody made progress"
        assert first not in plan.preempted
        if all(request.group.is_finished for _, request, _ in arrivals):
            world.pool.assert_idle()
            world.cache.allocate(world.pool.num_blocks)  # all that is known can be evicted
            return
    raise AssertionError("a group never ended")


def test_a_seat_goes_to_the_first_in_rank_when_nothing_else_can_step() -> None:
    """Of two groups that hold all blocks, the one behind has the only seat and needs a block more."""
    pool = BlockPool(6, 4)
    world = World(PrefixCache(pool, enabled=False), 1, 16, random.Random(0), Forecast(pool, 1))
    behind = asked(0, 12, max_tokens=8)
    world.arrive(behind, by_handoff=True)
    world.running, world.waiting = [behind], []
    ahead = asked(1, 12, max_tokens=8, priority=1)
    world.arrive(ahead, by_handoff=True)
    assert pool.num_free == 0

    assert world.step().preempted == (behind,)
    assert [request for request, _, _ in world.step().scheduled] == [ahead]


@st.composite
def crowded_worlds(draw: st.DrawFn) -> World:
    """Landed groups, some further than others, in a pool with few blocks left."""
    pool = BlockPool(200, draw(st.sampled_from([1, 2, 4])))
    cache = PrefixCache(pool, enabled=draw(st.booleans()))
    world = World(cache, 12, 16, random.Random(0), Forecast(pool, 1))
    for number in range(draw(st.integers(2, 5))):
        each = asked(
            number, draw(st.integers(1, 9)), n=draw(st.integers(1, 4)), emitted=draw(st.sampled_from([0, 0, 5]))
        )
        world.arrive(each, by_handoff=True)
        for seq in each.group.sequences[: draw(st.integers(0, 4))]:
            for _ in range(draw(st.integers(0, 3)) if seq.num_remaining_tokens == 1 else 0):
                each.group.copy_on_write(seq, cache)
                seq.add_blocks(cache.allocate(seq.blocks_wanted(1, pool.block_size)))
                seq.step_ended(seq.schedule(1))
                seq.append_token(TokenId(1))
    leave_free(pool, draw(st.integers(0, 3)))
    return world


@given(crowded_worlds())
@settings(max_examples=300, deadline=None)
def test_a_plan_takes_no_more_than_is_free_and_what_its_victims_really_free(world: World) -> None:
    for _ in range(4):
        world.carry_out(world.plan())  # the pool raises else
        world.running.sort(key=lambda request: request.rank)
        world.waiting.sort(key=lambda request: request.rank)
