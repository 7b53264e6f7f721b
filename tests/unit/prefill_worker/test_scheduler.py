"""The prefill scheduler, by example and by random arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_worker.scheduler import BatchLimits, Chunk, PrefillScheduler
from shell.clock import Deadline
from shell.telemetry.events import Events
from tandem.types import BlockId, ChoiceSpec, GroupSpec, Handle, RequestId, SamplingParams, TokenId
from tests.manual_clock import ManualClock
from worker.request import Request

BLOCK_SIZE = 16


class Arrivals:
    """Makes requests that nobody listens to, in order of arrival."""

    def __init__(self) -> None:
        self._num = 0

    def request(
        self,
        num_tokens: int,
        *,
        priority: int = 0,
        choices: tuple[ChoiceSpec, ...] = (ChoiceSpec(0),),
        destination: str = "a",
    ) -> Request:
        self._num += 1
        spec = GroupSpec(
            RequestId("r"), (TokenId(1),) * num_tokens, SamplingParams(max_tokens=9), choices, priority=priority
        )
        deadline = Deadline.after(ManualClock(), None)
        return Request(None, Handle(self._num), spec, self._num, 0.0, deadline, Events(), destination)  # type: ignore[arg-type]


arrivals = Arrivals()
make = arrivals.request


@dataclass(frozen=True)
class Plan:
    """One step: prompts that begin to run, and what is computed."""

    admitted: tuple[Request, ...]
    chunks: tuple[Chunk, ...]


def plan_step(scheduler: PrefillScheduler, num_free_blocks: int, lent: Mapping[str, int] | None = None) -> Plan:
    """As the step loop plans, where nothing is cached."""
    admitted = []
    while (request := scheduler.admit(num_free_blocks, lent or {})) is not None:
        prefix, num_blocks = request.group.prefix, scheduler.num_blocks(request)
        prefix.add_blocks([BlockId(block) for block in range(num_blocks)])
        num_free_blocks -= num_blocks
        admitted.append(request)
    return Plan(tuple(admitted), scheduler.chunks())


def compute(scheduler: PrefillScheduler, plan: Plan) -> list[Request]:
    """Does what an engine step does; returns the requests whose prompts it finished."""
    done = []
    for chunk in plan.chunks:
        chunk.request.group.prefix.schedule(chunk.num_tokens)
        if chunk.is_last:
            scheduler.remove(chunk.request)
            done.append(chunk.request)
    return done


def scheduler_of(
    chunk_tokens: int = 64,
    max_seqs: int = 8,
    max_overtakes: int = 4,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = 100,
) -> PrefillScheduler:
    return PrefillScheduler(BatchLimits(chunk_tokens, max_seqs, max_overtakes), block_size, num_blocks)


def test_many_short_prompts_share_one_batch() -> None:
    scheduler = scheduler_of(chunk_tokens=64)
    prompts = [make(8) for _ in range(8)]
    for prompt in prompts:
        scheduler.add(prompt)
    plan = plan_step(scheduler, num_free_blocks=100)
    assert plan.admitted == tuple(prompts)
    assert [chunk.num_tokens for chunk in plan.chunks] == [8] * 8


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    scheduler = scheduler_of(chunk_tokens=64)
    prompt = make(150)
    scheduler.add(prompt)
    sizes = []
    while prompt in scheduler:
        plan = plan_step(scheduler, num_free_blocks=10)
        sizes += [chunk.num_tokens for chunk in plan.chunks]
        compute(scheduler, plan)
    assert sizes == [64, 64, 22]


def test_a_short_prompt_behind_a_long_one_ends_first() -> None:
    scheduler = scheduler_of(chunk_tokens=64)
    long, short = make(1000), make(8)
    scheduler.add(long)
    compute(scheduler, plan_step(scheduler, num_free_blocks=100))
    scheduler.add(short)
    done: list[Request] = []
    while not done:
        done = compute(scheduler, plan_step(scheduler, num_free_blocks=100))
    assert done == [short]


def test_higher_priority_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    scheduler = scheduler_of(max_seqs=3)
    first, second, urgent = make(8), make(8), make(8, priority=1)
    for prompt in (first, second, urgent):
        scheduler.add(prompt)
    assert plan_step(scheduler, num_free_blocks=100).admitted == (urgent, first, second)


def test_a_prompt_that_does_not_fit_is_overtaken_by_one_that_does() -> None:
    scheduler = scheduler_of()
    big, small = make(160), make(16)
    scheduler.add(big)
    scheduler.add(small)
    assert plan_step(scheduler, num_free_blocks=4).admitted == (small,)
    assert scheduler.num_waiting == 1


def test_a_prompt_overtaken_too_often_goes_first_and_blocks_the_others() -> None:
    scheduler = scheduler_of(max_overtakes=2)
    big = make(160)
    scheduler.add(big)
    for _ in range(2):
        scheduler.add(make(16))
        compute(scheduler, plan_step(scheduler, num_free_blocks=4))
    late = make(16)
    scheduler.add(late)
    assert plan_step(scheduler, num_free_blocks=4).admitted == ()
    assert plan_step(scheduler, num_free_blocks=11).admitted == (big, late)


def test_a_low_priority_prompt_is_not_starved_by_urgent_ones() -> None:
    scheduler = scheduler_of(max_seqs=1, max_overtakes=3)
    patient = make(8)
    scheduler.add(patient)
    done: list[Request] = []
    for _ in range(4):
        scheduler.add(make(8, priority=9))
        done += compute(scheduler, plan_step(scheduler, num_free_blocks=100))
    assert done.index(patient) == 3


def test_a_removed_prompt_is_not_planned_again() -> None:
    scheduler = scheduler_of()
    waiting, running = make(16), make(600)
    scheduler.add(running)
    plan_step(scheduler, num_free_blocks=100)
    scheduler.add(waiting)
    scheduler.remove(waiting)
    scheduler.remove(running)
    scheduler.remove(running)
    assert plan_step(scheduler, num_free_blocks=100) == Plan((), ())
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_queued_tokens) == (0, 0, 0)


def test_a_prompt_counts_once_however_many_choices_continue_it() -> None:
    scheduler = scheduler_of(chunk_tokens=64)
    many = make(20, choices=tuple(map(ChoiceSpec, range(8))))
    scheduler.add(many)
    assert (scheduler.num_queued_tokens, scheduler.num_blocks(many)) == (20, 2)
    assert [(chunk.num_tokens, chunk.is_last) for chunk in plan_step(scheduler, num_free_blocks=2).chunks] == [
        (20, True)
    ]


def test_the_output_of_a_resumed_choice_that_is_alone_is_computed_with_its_prompt() -> None:
    scheduler = scheduler_of(chunk_tokens=64)
    resumed = make(20, choices=(ChoiceSpec(3, (TokenId(1),) * 5),))
    scheduler.add(resumed)
    assert [chunk.num_tokens for chunk in plan_step(scheduler, num_free_blocks=2).chunks] == [25]


def test_tokens_of_a_launched_step_are_no_longer_queued() -> None:
    scheduler = scheduler_of(chunk_tokens=16)
    prompt = make(20)
    scheduler.add(prompt)
    for left in (4, 0):
        (chunk,) = plan_step(scheduler, num_free_blocks=9).chunks
        prompt.group.prefix.schedule(chunk.num_tokens)
        assert scheduler.num_queued_tokens == left


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
    prompts = [make(n, priority=p) for n, p in arrivals]
    scheduler = scheduler_of(chunk_tokens, max_seqs, block_size=block_size)
    wanted = {prompt: scheduler.num_blocks(prompt) for prompt in prompts}
    num_blocks = max(wanted.values()) + extra_blocks
    pending, num_free, admitted, ended = list(prompts), num_blocks, set[int](), set[int]()
    while len(ended) < len(prompts):
        for prompt in pending[:per_round]:
            scheduler.add(prompt)
        del pending[:per_round]
        plan = plan_step(scheduler, num_free)
        num_free -= sum(wanted[prompt] for prompt in plan.admitted)
        admitted.update(id(prompt) for prompt in plan.admitted)
        assert num_free >= 0
        assert plan.chunks, "prompts wait and none of them advances"
        assert 1 <= sum(chunk.num_tokens for chunk in plan.chunks) <= chunk_tokens
        assert len(plan.chunks) <= max_seqs
        for chunk in plan.chunks:
            assert id(chunk.request) in admitted - ended
            assert 1 <= chunk.num_tokens <= chunk.request.group.prefix.num_remaining_tokens
        for prompt in compute(scheduler, plan):
            num_free += wanted[prompt]
            ended.add(id(prompt))
    assert num_free == num_blocks


def test_a_destination_that_takes_nothing_holds_at_most_half_of_the_pool() -> None:
    scheduler = scheduler_of(num_blocks=8)
    slow = [make(16, destination="slow") for _ in range(6)]
    fast = make(16, destination="fast")
    for prompt in (*slow, fast):
        scheduler.add(prompt)
    assert set(plan_step(scheduler, num_free_blocks=8).admitted) == {*slow[:4], fast}
    for prompt in (*slow[:4], fast):
        scheduler.remove(prompt)
    assert plan_step(scheduler, num_free_blocks=4, lent={"slow": 4}).admitted == ()
    assert plan_step(scheduler, num_free_blocks=6, lent={"slow": 2}).admitted == tuple(slow[4:])


def test_a_destination_alone_may_fill_the_pool() -> None:
    scheduler = scheduler_of(num_blocks=8)
    prompts = [make(32), make(64), make(32)]
    for prompt in prompts:
        scheduler.add(prompt)
    assert set(plan_step(scheduler, num_free_blocks=8).admitted) == set(prompts)


def test_one_prompt_may_be_larger_than_the_share_of_its_destination() -> None:
    scheduler = scheduler_of(num_blocks=8)
    large, small = make(6 * 16, destination="a", priority=1), make(16, destination="b")
    for prompt in (large, make(16, destination="a"), small):
        scheduler.add(prompt)
    assert plan_step(scheduler, num_free_blocks=8).admitted == (large, small)


def test_a_prompt_beyond_its_share_holds_up_none_for_another_destination() -> None:
    scheduler = scheduler_of(num_blocks=8, max_overtakes=2)
    waits = make(4 * 16, destination="slow")
    scheduler.add(waits)
    for _ in range(6):
        other = make(16, destination="fast")
        scheduler.add(other)
        assert plan_step(scheduler, num_free_blocks=5, lent={"slow": 3}).admitted == (other,)
        scheduler.remove(other)


def test_a_large_prompt_beyond_its_share_is_not_overtaken_for_ever_by_small_ones_to_the_same_place() -> None:
    scheduler = scheduler_of(num_blocks=8, max_overtakes=2)
    large = make(4 * 16, destination="slow")
    scheduler.add(large)
    for num_lent in (2, 3):
        small = make(16, destination="slow")
        scheduler.add(small)
        scheduler.add(fast := make(16, destination="fast"))
        assert set(plan_step(scheduler, num_free_blocks=5, lent={"slow": num_lent}).admitted) == {small, fast}
        scheduler.remove(small)
        scheduler.remove(fast)
    scheduler.add(make(16, destination="slow"))
    assert plan_step(scheduler, num_free_blocks=5, lent={"slow": 3}).admitted == ()
    assert plan_step(scheduler, num_free_blocks=8).admitted[0] is large


def test_blocks_that_others_hold_are_not_counted_of_the_prompt_that_goes_first() -> None:
    scheduler = scheduler_of()
    first, second = make(160), make(160)
    for prompt in (first, second):
        scheduler.add(prompt)
    held = {first: 7, second: 9}
    assert scheduler.admit(2, {}, held.__getitem__) is None
    assert scheduler.admit(3, {}, held.__getitem__) is first
    assert scheduler.admit(0, {}, held.__getitem__) is None
    assert scheduler.admit(1, {}, held.__getitem__) is second


def test_tokens_that_may_be_found_are_not_queued() -> None:
    scheduler = scheduler_of()
    scheduler.add(make(40), num_cached_tokens=32)
    assert scheduler.num_queued_tokens == 8
