"""The prefill scheduler, by example and by random arrivals."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_worker.scheduler import BatchLimits, Plan, PrefillScheduler


class FakePrompt:
    def __init__(self, num_tokens: int, *, block_size: int = 16, priority: int = 0) -> None:
        self.num_tokens = num_tokens
        self.num_computed_tokens = 0
        self.num_blocks = -(-num_tokens // block_size)
        self.priority = priority

    @property
    def num_remaining_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens


def compute(scheduler: PrefillScheduler[FakePrompt], plan: Plan[FakePrompt]) -> list[FakePrompt]:
    """Does what an engine step does; returns the prompts that it finished."""
    done = []
    for chunk in plan.chunks:
        chunk.prompt.num_computed_tokens += chunk.num_tokens
        if chunk.prompt.num_remaining_tokens == 0:
            scheduler.remove(chunk.prompt)
            done.append(chunk.prompt)
    return done


def scheduler_of(chunk_tokens: int = 64, max_seqs: int = 8, max_overtakes: int = 4) -> PrefillScheduler[FakePrompt]:
    return PrefillScheduler(BatchLimits(chunk_tokens, max_seqs, max_overtakes))


def test_many_short_prompts_share_one_batch() -> None:
    scheduler = scheduler_of(chunk_tokens=64)
    prompts = [FakePrompt(8) for _ in range(8)]
    for prompt in prompts:
        scheduler.add(prompt)
    plan = scheduler.plan(num_free_blocks=100)
    assert plan.admitted == tuple(prompts)
    assert [chunk.num_tokens for chunk in plan.chunks] == [8] * 8


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    scheduler = scheduler_of(chunk_tokens=64)
    prompt = FakePrompt(150)
    scheduler.add(prompt)
    sizes = []
    while prompt.num_remaining_tokens:
        plan = scheduler.plan(num_free_blocks=10)
        sizes += [chunk.num_tokens for chunk in plan.chunks]
        compute(scheduler, plan)
    assert sizes == [64, 64, 22]


def test_a_short_prompt_behind_a_long_one_ends_first() -> None:
    scheduler = scheduler_of(chunk_tokens=64)
    long, short = FakePrompt(1000), FakePrompt(8)
    scheduler.add(long)
    compute(scheduler, scheduler.plan(num_free_blocks=100))
    scheduler.add(short)
    done: list[FakePrompt] = []
    while not done:
        done = compute(scheduler, scheduler.plan(num_free_blocks=100))
    assert done == [short]


def test_higher_priority_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    scheduler = scheduler_of(max_seqs=3)
    first, second, urgent = FakePrompt(8), FakePrompt(8), FakePrompt(8, priority=1)
    for prompt in (first, second, urgent):
        scheduler.add(prompt)
    assert scheduler.plan(num_free_blocks=100).admitted == (urgent, first, second)


def test_a_prompt_that_does_not_fit_is_overtaken_by_one_that_does() -> None:
    scheduler = scheduler_of()
    big, small = FakePrompt(160), FakePrompt(16)
    scheduler.add(big)
    scheduler.add(small)
    assert scheduler.plan(num_free_blocks=4).admitted == (small,)
    assert scheduler.num_waiting == 1


def test_a_prompt_overtaken_too_often_goes_first_and_blocks_the_others() -> None:
    scheduler = scheduler_of(max_overtakes=2)
    big = FakePrompt(160)
    scheduler.add(big)
    for _ in range(2):
        scheduler.add(FakePrompt(16))
        compute(scheduler, scheduler.plan(num_free_blocks=4))
    late = FakePrompt(16)
    scheduler.add(late)
    assert scheduler.plan(num_free_blocks=4).admitted == ()
    assert scheduler.plan(num_free_blocks=11).admitted == (big, late)


def test_a_low_priority_prompt_is_not_starved_by_urgent_ones() -> None:
    scheduler = scheduler_of(max_seqs=1, max_overtakes=3)
    patient = FakePrompt(8)
    scheduler.add(patient)
    done: list[FakePrompt] = []
    for _ in range(4):
        scheduler.add(FakePrompt(8, priority=9))
        done += compute(scheduler, scheduler.plan(num_free_blocks=100))
    assert done.index(patient) == 3


def test_a_removed_prompt_is_not_planned_again() -> None:
    scheduler = scheduler_of()
    waiting, running = FakePrompt(16), FakePrompt(600)
    scheduler.add(running)
    scheduler.plan(num_free_blocks=100)
    scheduler.add(waiting)
    scheduler.remove(waiting)
    scheduler.remove(running)
    scheduler.remove(running)
    assert scheduler.plan(num_free_blocks=100) == Plan((), ())
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_queued_tokens) == (0, 0, 0)


prompts_strategy = st.lists(st.tuples(st.integers(1, 200), st.integers(-1, 1)), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(
    arrivals=prompts_strategy,
    per_round=st.integers(1, 5),
    chunk_tokens=st.integers(1, 96),
    max_seqs=st.integers(1, 6),
    extra_blocks=st.integers(0, 10),
    block_size=st.sampled_from([1, 16, 64]),
)
def test_random_arrivals_keep_the_budget_conserve_blocks_and_all_end(
    arrivals: list[tuple[int, int]],
    per_round: int,
    chunk_tokens: int,
    max_seqs: int,
    extra_blocks: int,
    block_size: int,
) -> None:
    prompts = [FakePrompt(n, block_size=block_size, priority=p) for n, p in arrivals]
    num_blocks = max(prompt.num_blocks for prompt in prompts) + extra_blocks
    scheduler = scheduler_of(chunk_tokens, max_seqs)
    pending, num_free, admitted, ended = list(prompts), num_blocks, set[int](), set[int]()
    while len(ended) < len(prompts):
        for prompt in pending[:per_round]:
            scheduler.add(prompt)
        del pending[:per_round]
        plan = scheduler.plan(num_free)
        num_free -= sum(prompt.num_blocks for prompt in plan.admitted)
        admitted.update(id(prompt) for prompt in plan.admitted)
        assert num_free >= 0
        assert plan.chunks, "prompts wait and none of them advances"
        assert 1 <= sum(chunk.num_tokens for chunk in plan.chunks) <= chunk_tokens
        assert len(plan.chunks) <= max_seqs
        for chunk in plan.chunks:
            assert id(chunk.prompt) in admitted - ended
            assert 1 <= chunk.num_tokens <= chunk.prompt.num_remaining_tokens
        for prompt in compute(scheduler, plan):
            num_free += prompt.num_blocks
            ended.add(id(prompt))
    assert num_free == num_blocks
