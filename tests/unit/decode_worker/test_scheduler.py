"""The step planner: exact decisions in small cases, rules in random worlds of real groups and a real pool."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.growth import Growth
from decode_worker.scheduler import StepLimits, StepPlan, plan_step
from engine.block_pool import BlockPool
from engine.group import Group
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from engine.step import ScheduledSeq
from tandem.types import ChoiceSpec, GroupSpec, RequestId, SamplingParams, TokenId
from worker.request import Rank

END = TokenId(9)
BLOCK_SIZE = 4


@dataclass(eq=False)
class Asked:
    """A request as plans see it."""

    rank: Rank
    group: Group


def asked(
    number: int, num_prompt_tokens: int, *, n: int = 1, max_tokens: int = 99, priority: int = 0, emitted: int = 0
) -> Asked:
    spec = GroupSpec(
        RequestId(f"r{number}"),
        tuple(TokenId(1) for _ in range(num_prompt_tokens)),
        SamplingParams(max_tokens=max_tokens, end_token_ids=frozenset({END})),
        tuple(ChoiceSpec(index, (TokenId(1),) * emitted) for index in range(n)),
    )
    return Asked((-priority, number), Group(spec))


def landed(pool: BlockPool, number: int, num_prompt_tokens: int, *, n: int = 1, priority: int = 0) -> Asked:
    """Each choice has one token to compute."""
    each = asked(number, num_prompt_tokens, n=n, priority=priority)
    blocks = pool.allocate(-(-num_prompt_tokens // pool.block_size))
    each.group.land(blocks, {index: TokenId(1) for index in range(n)}, pool)
    return each


def leave_free(pool: BlockPool, num_blocks: int) -> None:
    pool.allocate(pool.num_free - num_blocks)


def limits(max_seqs: int = 8, chunk_tokens: int = 16) -> StepLimits:
    return StepLimits(BLOCK_SIZE, max_seqs, chunk_tokens)


def planned(running: list[Asked], waiting: list[Asked], pool: BlockPool, shape: StepLimits) -> StepPlan:
    """Completions are expected to become 4 tokens long."""
    return plan_step(running, waiting, PrefixCache(pool), shape, Growth(pool, 4))


def scheduled(plan: StepPlan) -> list[tuple[Asked, int, int]]:
    """Request, index of the choice (-1 = the prefix of several), tokens."""
    return [(request, seq.index, num_tokens) for request, seq, num_tokens in plan.scheduled]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(99, BLOCK_SIZE)


def test_a_running_sequence_takes_one_token_and_a_waiting_prompt_its_chunk(pool: BlockPool) -> None:
    old, new = landed(pool, 0, 2), asked(1, 40)
    plan = planned([old], [new], pool, limits())
    assert plan.admitted == (new,)
    assert scheduled(plan) == [(old, 0, 1), (new, 0, 16)]


def test_decode_seqs_do_not_use_up_the_chunk_budget(pool: BlockPool) -> None:
    running = [landed(pool, number, 2) for number in range(6)]
    plan = planned(running, [asked(9, 10)], pool, limits(chunk_tokens=4))
    assert [num_tokens for *_, num_tokens in scheduled(plan)] == [1] * 6 + [4]


def test_the_last_ranked_holder_is_preempted_when_the_pool_is_dry(pool: BlockPool) -> None:
    requests = [landed(pool, 0, 4), landed(pool, 1, 7), landed(pool, 2, 7)]
    leave_free(pool, 0)
    plan = planned(requests, [], pool, limits())
    assert plan.preempted == (requests[2],)
    assert scheduled(plan) == [(requests[0], 0, 1), (requests[1], 0, 1)]


def test_a_lower_priority_is_preempted_before_a_later_arrival(pool: BlockPool) -> None:
    humble, urgent_late = landed(pool, 0, 7), landed(pool, 1, 8, priority=5)
    leave_free(pool, 0)
    plan = planned([urgent_late, humble], [], pool, limits())
    assert plan.preempted == (humble,)
    assert scheduled(plan) == [(urgent_late, 0, 1)]


def test_a_request_with_nobody_behind_it_sits_out_instead_of_being_preempted(pool: BlockPool) -> None:
    first, last = landed(pool, 0, 3), landed(pool, 1, 4)
    leave_free(pool, 0)
    plan = planned([first, last], [], pool, limits())
    assert scheduled(plan) == [(first, 0, 1)]
    assert plan.preempted == ()
    assert plan.lacks_blocks


def test_a_landed_sequence_joins_at_once_without_head_room(pool: BlockPool) -> None:
    running, arrived = landed(pool, 0, 3), landed(pool, 1, 3)
    leave_free(pool, 0)
    plan = planned([running], [arrived], pool, limits())
    assert plan.admitted == (arrived,)
    assert scheduled(plan) == [(running, 0, 1), (arrived, 0, 1)]
    assert not plan.lacks_blocks


def test_a_landed_sequence_that_waits_for_a_seat_gives_up_its_blocks_to_an_earlier_one(pool: BlockPool) -> None:
    running, arrived = landed(pool, 0, 4), landed(pool, 1, 3)
    leave_free(pool, 0)
    plan = planned([running], [arrived], pool, limits(max_seqs=1))
    assert plan.preempted == (arrived,)
    assert scheduled(plan) == [(running, 0, 1)]


@pytest.mark.parametrize(("num_free", "runs", "admits"), [(3, True, False), (4, True, True), (2, False, True)])
def test_a_prompt_waits_until_it_fits_with_head_room_unless_it_is_alone(
    pool: BlockPool, num_free: int, runs: bool, admits: bool
) -> None:
    running = [landed(pool, 0, 3)] if runs else []
    leave_free(pool, num_free)
    assert bool(planned(running, [asked(1, 8)], pool, limits()).admitted) == admits


def test_prompts_are_not_overtaken_by_shorter_ones(pool: BlockPool) -> None:
    running = landed(pool, 0, 3)
    leave_free(pool, 20)
    assert planned([running], [asked(1, 400), asked(2, 2)], pool, limits()).admitted == ()


# --- groups ---


def test_a_group_takes_a_seat_for_each_choice(pool: BlockPool) -> None:
    running, group = landed(pool, 0, 3), landed(pool, 1, 3, n=3)
    assert planned([running], [group], pool, limits(max_seqs=3)).admitted == ()
    assert planned([running], [group], pool, limits(max_seqs=4)).admitted == (group,)


def test_a_shared_block_is_copied_for_all_holders_but_the_last(pool: BlockPool) -> None:
    group = landed(pool, 0, 6, n=3)
    leave_free(pool, 2)
    plan = planned([group], [], pool, limits())
    assert scheduled(plan) == [(group, 0, 1), (group, 1, 1), (group, 2, 1)]
    assert not plan.lacks_blocks


def test_a_choice_without_a_block_for_its_copy_sits_out(pool: BlockPool) -> None:
    group = landed(pool, 0, 6, n=3)
    leave_free(pool, 1)
    plan = planned([group], [], pool, limits())
    assert scheduled(plan) == [(group, 0, 1)]
    assert plan.lacks_blocks


def test_a_preempted_group_is_credited_with_the_blocks_that_it_alone_holds(pool: BlockPool) -> None:
    first, victim = landed(pool, 0, 8, n=2), landed(pool, 1, 7, n=3)
    pool.retain(victim.group.sequences[0].block_table[:1])  # as a prefix cache would
    leave_free(pool, 0)
    plan = planned([first, victim], [], pool, limits())
    assert plan.preempted == (victim,)
    assert scheduled(plan) == [(first, 0, 1)], "one block comes back, however many choices held it"


def test_a_prompt_of_several_choices_is_computed_once(pool: BlockPool) -> None:
    group = asked(0, 6, n=3)
    assert scheduled(planned([], [group], pool, limits())) == [(group, -1, 6)]


def test_resumed_choices_compute_their_tokens_under_the_chunk_budget(pool: BlockPool) -> None:
    group = asked(0, 8, n=2, emitted=10)
    group.group.land(pool.allocate(2), {}, pool)
    assert scheduled(planned([group], [], pool, limits(chunk_tokens=16))) == [(group, 0, 10), (group, 1, 6)]


# --- behind a step in flight ---


def step_all(pool: BlockPool, *requests: Asked) -> None:
    """Launches a step of one token for each."""
    for request in requests:
        for seq in request.group.running:
            seq.add_blocks(pool.allocate(seq.blocks_wanted(1, pool.block_size)))
            seq.schedule(1)


def test_a_sequence_whose_tokens_are_all_drawn_or_pending_is_left_out(pool: BlockPool) -> None:
    ending, going = asked(0, 3, max_tokens=2), landed(pool, 1, 3)
    ending.group.land(pool.allocate(1), {0: TokenId(1)}, pool)
    step_all(pool, ending, going)
    assert scheduled(planned([ending, going], [], pool, limits())) == [(going, 0, 1)]


def test_a_sequence_that_needs_its_last_token_on_the_host_sits_out_one_plan(pool: BlockPool) -> None:
    masked, plain = landed(pool, 0, 3), landed(pool, 1, 3)
    (seq,) = masked.group.sequences
    seq.runs_ahead = False
    assert len(planned([masked, plain], [], pool, limits()).scheduled) == 2
    step_all(pool, masked, plain)
    assert scheduled(planned([masked, plain], [], pool, limits())) == [(plain, 0, 1)]
    seq.append_token(TokenId(1))
    assert len(planned([masked, plain], [], pool, limits()).scheduled) == 2


def test_a_prefix_whose_first_tokens_are_pending_is_left_out(pool: BlockPool) -> None:
    group = asked(0, 1, n=2)
    step_all(pool, group)
    assert scheduled(planned([group], [], pool, limits())) == []


# --- random worlds ---


@dataclass
class World:
    """A pool and its requests, driven by plans only. All tokens but ends are equal, so that nearly all KV is known."""

    cache: PrefixCache
    limits: StepLimits
    rng: random.Random
    growth: Growth
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
        return plan_step(self.running, self.waiting, self.cache, self.limits, self.growth)

    def check(self, plan: StepPlan) -> None:
        seqs = [seq for _, seq, _ in plan.scheduled]
        assert len(seqs) == len(set(seqs)) <= self.limits.max_seqs
        assert set(plan.admitted) <= set(self.waiting)
        ranks = [request.rank for request, _, _ in plan.scheduled]
        assert {r for r, _, _ in plan.scheduled} <= {*self.running, *plan.admitted} - set(plan.preempted)
        for victim in plan.preempted:
            assert victim.group.holds_blocks or not ranks
            ahead = ranks or [request.rank for request in self.waiting if request.group.holds_blocks]
            assert min(ahead) < victim.rank, "nobody gained from a preemption"
        assert sum(n for _, seq, n in plan.scheduled if seq.num_remaining_tokens > 1) <= self.limits.chunk_tokens
        assert all(1 <= n <= seq.num_remaining_tokens for _, seq, n in plan.scheduled)

    def carry_out(self, plan: StepPlan) -> None:
        """The pool raises if more blocks are taken than there are."""
        for request in plan.admitted:
            self.waiting.remove(request)
            self.running.append(request)
        for request in plan.preempted:
            self.release(request)
            if request in self.running:
                self.running.remove(request)
                self.waiting.append(request)
        assert sum(request.group.num_seats for request in self.running) <= self.limits.max_seqs
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
    shape = StepLimits(size, max_seqs, draw(st.integers(1, 40)))
    growth = Growth(pool, draw(st.sampled_from([1, 8, 32])))
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
        assert each.group.spec.max_pool_tokens(size) <= total * size
        arrivals.append((step, each, draw(st.booleans())))
    return World(
        PrefixCache(pool, enabled=draw(st.booleans())), shape, random.Random(draw(st.integers(0, 99))), growth
    ), arrivals


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
    world = World(PrefixCache(pool, enabled=False), StepLimits(4, 1, 16), random.Random(0), Growth(pool, 1))
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
    world = World(cache, StepLimits(pool.block_size, 12, 16), random.Random(0), Growth(pool, 1))
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
        world.carry_out(planned(world.running, world.waiting, world.pool, world.limits))  # the pool raises else
        world.running.sort(key=lambda request: request.rank)
        world.waiting.sort(key=lambda request: request.rank)
