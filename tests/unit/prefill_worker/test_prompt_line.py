"""Which prompts start and what a step computes of them, by example and by random arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefill_worker.prompt_line import PromptLine
from shell.clock import Deadline
from shell.telemetry.events import Events
from tandem.types import BlockId, ChoiceSpec, GroupSpec, Handle, RequestId, SamplingParams, TokenId
from tests.manual_clock import ManualClock
from worker import admission
from worker.plan import share_tokens
from worker.request import Request

BLOCK_SIZE = 16
CHUNK_TOKENS = 64


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


@pytest.fixture(autouse=True)
def few_overtakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_OVERTAKES", 2)


@dataclass(frozen=True)
class Plan:
    """One step: prompts that begin to be computed, and how many tokens of which are computed."""

    admitted: tuple[Request, ...]
    chunks: tuple[tuple[Request, int], ...]


def plan_step(
    line: PromptLine, num_free_blocks: int, lent: Mapping[str, int] | None = None, chunk_tokens: int = CHUNK_TOKENS
) -> Plan:
    """As `Prompts` plans, where nothing is cached."""
    admitted = []
    while True:
        request, fits = line.next(num_free_blocks, lent or {})
        if request is None or not fits:
            break
        line.take(request, lent or {})
        prefix, num_blocks = request.group.prefix, line.num_blocks(request)
        prefix.add_blocks([BlockId(block) for block in range(num_blocks)])
        num_free_blocks -= num_blocks
        admitted.append(request)
    prompts = [(each, each.group.prefix.num_remaining_tokens) for each in line.computing]
    shares = share_tokens(prompts, chunk_tokens, chunk_tokens // 2)
    return Plan(
        tuple(admitted), tuple((each, share) for each, share in zip(line.computing, shares, strict=True) if share)
    )


def compute(line: PromptLine, plan: Plan) -> list[Request]:
    """Does what an engine step does; returns the requests whose prompts it finished."""
    done = []
    for request, num_tokens in plan.chunks:
        prefix = request.group.prefix
        is_last = num_tokens == prefix.num_remaining_tokens
        prefix.step_ended(prefix.schedule(num_tokens))
        if is_last:
            line.remove(request)
            done.append(request)
    return done


def line_of(
    max_seqs: int = 8,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = 100,
    *,
    beside_decodes: bool = False,
) -> PromptLine:
    return PromptLine(max_seqs, block_size, num_blocks, beside_decodes=beside_decodes)


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    line = line_of()
    prompt = make(150)
    line.add(prompt)
    sizes = []
    while len(line) or line.computing:
        plan = plan_step(line, num_free_blocks=10)
        sizes += [num_tokens for _, num_tokens in plan.chunks]
        compute(line, plan)
    assert sizes == [64, 64, 22]


def test_a_short_prompt_behind_a_long_one_ends_first() -> None:
    line = line_of()
    long, short = make(1000), make(8)
    line.add(long)
    compute(line, plan_step(line, num_free_blocks=100))
    line.add(short)
    done: list[Request] = []
    while not done:
        done = compute(line, plan_step(line, num_free_blocks=100))
    assert done == [short]


def test_higher_priority_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    line = line_of(max_seqs=3)
    first, second, urgent = make(8), make(8), make(8, priority=1)
    for prompt in (first, second, urgent):
        line.add(prompt)
    assert plan_step(line, num_free_blocks=100).admitted == (urgent, first, second)


def test_a_prompt_overtaken_too_often_goes_first_and_blocks_the_others() -> None:
    line = line_of()
    big = make(160)
    line.add(big)
    for _ in range(2):
        line.add(make(16))
        compute(line, plan_step(line, num_free_blocks=4))
    late = make(16)
    line.add(late)
    assert plan_step(line, num_free_blocks=4).admitted == ()
    assert plan_step(line, num_free_blocks=11).admitted == (big, late)


def test_a_low_priority_prompt_is_not_starved_by_urgent_ones() -> None:
    line = line_of(max_seqs=1)
    patient = make(8)
    line.add(patient)
    done: list[Request] = []
    for _ in range(3):
        line.add(make(8, priority=9))
        done += compute(line, plan_step(line, num_free_blocks=100))
    assert done.index(patient) == 2


def test_a_removed_prompt_is_not_planned_again() -> None:
    line = line_of()
    waiting, running = make(16), make(600)
    line.add(running)
    plan_step(line, num_free_blocks=100)
    line.add(waiting)
    line.remove(waiting)
    line.remove(running)
    line.remove(running)
    assert plan_step(line, num_free_blocks=100) == Plan((), ())
    assert (len(line), len(line.computing), line.num_tokens) == (0, 0, 0)


def test_a_prompt_counts_once_however_many_choices_continue_it() -> None:
    line = line_of()
    many = make(20, choices=tuple(map(ChoiceSpec, range(8))))
    line.add(many)
    assert (line.num_tokens, line.num_blocks(many)) == (20, 2)
    assert plan_step(line, num_free_blocks=2).chunks == ((many, 20),)


def test_the_output_of_a_resumed_choice_that_is_alone_is_computed_with_its_prompt() -> None:
    line = line_of()
    resumed = make(20, choices=(ChoiceSpec(3, (TokenId(1),) * 5),))
    line.add(resumed)
    assert plan_step(line, num_free_blocks=2).chunks == ((resumed, 25),)


def test_tokens_are_queued_until_their_step_has_ended() -> None:
    line = line_of()
    prompt = make(20)
    line.add(prompt)
    plan_step(line, num_free_blocks=9)
    prefix = prompt.group.prefix
    for num_tokens, left in ((16, 20), (4, 4)):
        scheduled = prefix.schedule(num_tokens)
        assert line.num_tokens == left
        prefix.step_ended(scheduled)
    assert line.num_tokens == 0


prompts_strategy = st.lists(st.tuples(st.integers(1, 200), st.integers(-1, 1)), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    line = line_of(max_seqs, block_size=block_size)
    wanted = {prompt: line.num_blocks(prompt) for prompt in prompts}
    num_blocks = max(wanted.values()) + extra_blocks
    pending, num_free, admitted, ended = list(prompts), num_blocks, set[int](), set[int]()
    while len(ended) < len(prompts):
        for prompt in pending[:per_round]:
            line.add(prompt)
        del pending[:per_round]
        plan = plan_step(line, num_free, chunk_tokens=chunk_tokens)
        num_free -= sum(wanted[prompt] for prompt in plan.admitted)
        admitted.update(id(prompt) for prompt in plan.admitted)
        assert num_free >= 0
        assert plan.chunks, "prompts wait and none of them advances"
        assert 1 <= sum(num_tokens for _, num_tokens in plan.chunks) <= chunk_tokens
        assert len(plan.chunks) <= max_seqs
        for prompt, num_tokens in plan.chunks:
            assert id(prompt) in admitted - ended
            assert 1 <= num_tokens <= prompt.group.prefix.num_remaining_tokens
        for prompt in compute(line, plan):
            num_free += wanted[prompt]
            ended.add(id(prompt))
    assert num_free == num_blocks


def test_a_destination_that_takes_nothing_holds_at_most_half_of_the_pool() -> None:
    line = line_of(num_blocks=8)
    slow = [make(16, destination="slow") for _ in range(6)]
    fast = make(16, destination="fast")
    for prompt in (*slow, fast):
        line.add(prompt)
    assert set(plan_step(line, num_free_blocks=8).admitted) == {*slow[:4], fast}
    for prompt in (*slow[:4], fast):
        line.remove(prompt)
    assert plan_step(line, num_free_blocks=4, lent={"slow": 4}).admitted == ()
    assert plan_step(line, num_free_blocks=6, lent={"slow": 2}).admitted == tuple(slow[4:])


def test_a_destination_alone_may_fill_the_pool() -> None:
    line = line_of(num_blocks=8)
    prompts = [make(32), make(64), make(32)]
    for prompt in prompts:
        line.add(prompt)
    assert set(plan_step(line, num_free_blocks=8).admitted) == set(prompts)


def test_one_prompt_may_be_larger_than_the_share_of_its_destination() -> None:
    line = line_of(num_blocks=8)
    large, small = make(6 * 16, destination="a", priority=1), make(16, destination="b")
    for prompt in (large, make(16, destination="a"), small):
        line.add(prompt)
    assert plan_step(line, num_free_blocks=8).admitted == (large, small)


def test_a_large_prompt_beyond_its_share_is_not_overtaken_for_ever_by_small_ones_to_the_same_place() -> None:
    line = line_of(num_blocks=8)
    large = make(4 * 16, destination="slow")
    line.add(large)
    for num_lent in (2, 3):
        small = make(16, destination="slow")
        line.add(small)
        line.add(fast := make(16, destination="fast"))
        assert set(plan_step(line, num_free_blocks=5, lent={"slow": num_lent}).admitted) == {small, fast}
        line.remove(small)
        line.remove(fast)
    line.add(make(16, destination="slow"))
    assert plan_step(line, num_free_blocks=5, lent={"slow": 3}).admitted == ()
    assert plan_step(line, num_free_blocks=8).admitted[0] is large


def test_blocks_that_others_hold_are_not_counted_of_the_prompt_that_goes_first() -> None:
    line = line_of()
    first, second = make(160), make(160)
    for prompt in (first, second):
        line.add(prompt)
    known = {first: 7, second: 9}.__getitem__
    assert line.next(2, {}, known) == (first, False)
    assert line.next(3, {}, known) == (first, True)
    line.take(first, {})
    assert line.next(0, {}, known) == (second, False)
    assert line.next(1, {}, known) == (second, True)


def test_beside_decodes_all_prompts_together_hold_at_most_half_of_the_pool_or_are_one() -> None:
    line = line_of(num_blocks=8, beside_decodes=True)
    first, second, third = (make(32, destination=destination) for destination in "abc")
    for prompt in (first, second, third):
        line.add(prompt)
    assert plan_step(line, num_free_blocks=8).admitted == (first, second)
    line.remove(first)
    assert plan_step(line, num_free_blocks=6, lent={"a": 2}).admitted == ()
    line.remove(second)
    line.add(long := make(5 * 16, priority=1))
    assert plan_step(line, num_free_blocks=7, lent={"b": 1}).admitted == (third,)
    line.remove(third)
    assert plan_step(line, num_free_blocks=8).admitted == (long,)


def test_tokens_that_may_be_found_are_not_queued() -> None:
    line = line_of()
    line.add(make(40), num_cached_tokens=32)
    assert line.num_tokens == 8
