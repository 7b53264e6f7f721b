"""The step planner: exact decisions in small cases, rules in random worlds."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.scheduler import Rank, StepLimits, StepPlan, plan_step


@dataclass(eq=False)
class Seq:
    number: int
    num_tokens: int
    num_computed_tokens: int = 0
    num_blocks: int = 0
    priority: int = 0
    max_tokens: int = 1

    @property
    def rank(self) -> Rank:
        return (-self.priority, self.number)


def limits(block_size: int = 4, max_seqs: int = 8, chunk_tokens: int = 16, headroom_tokens: int = 4) -> StepLimits:
    return StepLimits(block_size, max_seqs, chunk_tokens, headroom_tokens)


def decoding(number: int, num_tokens: int, num_blocks: int, priority: int = 0) -> Seq:
    return Seq(number, num_tokens, num_tokens - 1, num_blocks, priority)


def test_a_running_sequence_takes_one_token_and_a_waiting_prompt_its_chunk() -> None:
    old, new = decoding(0, 3, 1), Seq(1, 40)
    plan = plan_step([old], [new], 99, limits())
    assert plan == StepPlan(admitted=(new,), preempted=(), scheduled=((old, 1), (new, 16)))


def test_decode_seqs_do_not_use_up_the_chunk_budget() -> None:
    running = [decoding(i, 3, 1) for i in range(6)]
    prompt = Seq(9, 10)
    plan = plan_step(running, [prompt], 99, limits(chunk_tokens=4))
    assert (prompt, 4) in plan.scheduled
    assert len(plan.scheduled) == 7


def test_the_last_ranked_holder_is_preempted_when_the_pool_is_dry() -> None:
    seqs = [decoding(0, 5, 1), decoding(1, 8, 2), decoding(2, 8, 2)]
    plan = plan_step(seqs, [], 0, limits())
    assert plan.preempted == (seqs[2],)
    assert plan.scheduled == ((seqs[0], 1), (seqs[1], 1))


def test_a_lower_priority_is_preempted_before_a_later_arrival() -> None:
    humble, urgent_late = decoding(0, 8, 2, priority=0), decoding(1, 9, 2, priority=5)
    plan = plan_step([urgent_late, humble], [], 0, limits())
    assert plan.preempted == (humble,)
    assert plan.scheduled == ((urgent_late, 1),)


def test_who_has_nobody_behind_it_sits_out_instead_of_being_preempted() -> None:
    first, last = decoding(0, 4, 1), decoding(1, 5, 1)
    plan = plan_step([first, last], [], 0, limits())
    assert plan == StepPlan((), (), ((first, 1),))


def test_a_landed_sequence_joins_at_once_without_head_room() -> None:
    running, landed = decoding(0, 4, 1), decoding(1, 4, 1)
    plan = plan_step([running], [landed], 0, limits())
    assert plan.admitted == (landed,)
    assert plan.scheduled == ((running, 1), (landed, 1))


def test_a_landed_sequence_that_waits_for_a_seat_gives_up_its_blocks_to_an_earlier_one() -> None:
    running, landed = decoding(0, 5, 1), decoding(1, 4, 1)
    plan = plan_step([running], [landed], 0, limits(max_seqs=1))
    assert plan.preempted == (landed,)
    assert plan.scheduled == ((running, 1),)


def test_a_prompt_waits_until_it_fits_with_head_room_unless_it_is_alone() -> None:
    running, prompt = decoding(0, 4, 1), Seq(1, 8)
    assert plan_step([running], [prompt], 3, limits()).admitted == ()
    assert plan_step([running], [prompt], 4, limits()).admitted == (prompt,)
    assert plan_step([], [prompt], 2, limits()).admitted == (prompt,)


def test_prompts_are_not_overtaken_by_shorter_ones() -> None:
    plan = plan_step([decoding(0, 4, 1)], [Seq(1, 400), Seq(2, 2)], 20, limits())
    assert plan.admitted == ()


@dataclass
class World:
    """A pool and its sequences, driven by plans only."""

    total: int
    limits: StepLimits
    running: list[Seq] = field(default_factory=list)
    waiting: list[Seq] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.total - sum(seq.num_blocks for seq in (*self.running, *self.waiting))

    def step(self) -> StepPlan[Seq]:
        by_rank = sorted((*self.running, *self.waiting), key=lambda seq: seq.rank)
        plan = plan_step(
            [seq for seq in by_rank if seq in self.running],
            [seq for seq in by_rank if seq in self.waiting],
            self.free,
            self.limits,
        )
        self.check(plan)
        self.apply(plan)
        return plan

    def check(self, plan: StepPlan[Seq]) -> None:
        scheduled = [seq for seq, _ in plan.scheduled]
        assert len(scheduled) == len(set(scheduled)) <= self.limits.max_seqs
        assert set(plan.admitted) <= set(self.waiting)
        assert set(scheduled) <= {*self.running, *plan.admitted} - set(plan.preempted)
        for victim in plan.preempted:
            assert victim.num_blocks > 0
            assert any(seq.rank < victim.rank for seq in scheduled), "nobody gained from a preemption"
            assert all(seq.rank < victim.rank for seq, n in plan.scheduled if self.grows(seq, n))
        chunks = [n for seq, n in plan.scheduled if seq.num_tokens - seq.num_computed_tokens > 1]
        assert sum(chunks) <= self.limits.chunk_tokens
        assert all(1 <= n <= seq.num_tokens - seq.num_computed_tokens for seq, n in plan.scheduled)

    def grows(self, seq: Seq, num_tokens: int) -> bool:
        return self.limits.blocks_for(seq.num_computed_tokens + num_tokens) > seq.num_blocks

    def apply(self, plan: StepPlan[Seq]) -> None:
        for seq in plan.admitted:
            self.waiting.remove(seq)
            self.running.append(seq)
        for seq in plan.preempted:
            seq.num_blocks = seq.num_computed_tokens = 0
            if seq in self.running:
                self.running.remove(seq)
                self.waiting.append(seq)
        assert len(self.running) <= self.limits.max_seqs
        for seq, num_tokens in plan.scheduled:
            end = seq.num_computed_tokens + num_tokens
            seq.num_blocks = max(seq.num_blocks, self.limits.blocks_for(end))
            assert self.free >= 0, "more blocks given out than there are"
            seq.num_computed_tokens = end
            if end == seq.num_tokens:
                seq.num_tokens += 1
                seq.max_tokens -= 1
                if seq.max_tokens == 0:
                    self.running.remove(seq)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[tuple[int, Seq]]]:
    """A world, and who arrives after how many steps."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    total = draw(st.integers(4, 24))
    shape = limits(block_size, draw(st.integers(1, 6)), draw(st.integers(1, 40)), draw(st.sampled_from([1, 8, 32])))
    arrivals = []
    step = 0
    for number in range(draw(st.integers(1, 12))):
        step += draw(st.integers(0, 5))
        num_tokens = draw(st.integers(1, total * block_size))
        max_tokens = draw(st.integers(1, total * block_size - num_tokens + 1))
        priority = draw(st.sampled_from([0, 0, 0, 1]))
        arrivals.append((step, Seq(number, num_tokens, priority=priority, max_tokens=max_tokens)))
    return World(total, shape), arrivals


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_every_sequence_ends_whatever_arrives_when(case: tuple[World, list[tuple[int, Seq]]]) -> None:
    world, arrivals = case
    for step in range(50 + 40 * sum(seq.num_tokens + seq.max_tokens for _, seq in arrivals)):
        world.waiting += [seq for at, seq in arrivals if at == step]
        holders = [seq for seq in (*world.running, *world.waiting) if seq.num_blocks]
        plan = world.step()
        assert plan.scheduled or not (world.running or world.waiting), "nobody got on"
        assert not holders or min(holders, key=lambda seq: seq.rank) not in plan.preempted
        if all(seq.max_tokens == 0 for _, seq in arrivals):
            return
    raise AssertionError("a sequence never ended")
