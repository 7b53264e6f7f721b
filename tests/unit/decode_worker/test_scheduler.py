"""The step planner: exact decisions in small cases."""

from __future__ import annotations

import pytest

from decode_worker.scheduler import StepPlan, StepPlanner
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from tandem.types import TokenId
from tests.asked import BLOCK_SIZE, Asked, asked, leave_free
from worker.admission import Forecast, note_overtaken
from worker.tuning import MAX_OVERTAKES


def landed(pool: BlockPool, number: int, num_prompt_tokens: int, *, n: int = 1, priority: int = 0) -> Asked:
    """Each choice has one token to compute."""
    each = asked(number, num_prompt_tokens, n=n, priority=priority)
    blocks = pool.allocate(-(-num_prompt_tokens // pool.block_size))
    each.group.land(blocks, {index: TokenId(1) for index in range(n)}, pool)
    return each


def planned(
    running: list[Asked], waiting: list[Asked], pool: BlockPool, *, max_seqs: int = 8, chunk_tokens: int = 16
) -> StepPlan:
    """Completions are expected to become 4 tokens long."""
    return StepPlanner(
        running, waiting, PrefixCache(pool), Forecast(pool, 4), max_seqs=max_seqs, chunk_tokens=chunk_tokens
    ).plan()


def scheduled(plan: StepPlan) -> list[tuple[Asked, int, int]]:
    """Request, index of the choice (-1 = the prefix of several), tokens."""
    return [(request, seq.index, num_tokens) for request, seq, num_tokens in plan.scheduled]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(99, BLOCK_SIZE)


def test_a_running_sequence_takes_one_token_and_a_waiting_prompt_its_chunk(pool: BlockPool) -> None:
    old, new = landed(pool, 0, 2), asked(1, 40)
    plan = planned([old], [new], pool)
    assert plan.admitted == (new,)
    assert scheduled(plan) == [(old, 0, 1), (new, 0, 16)]


def test_decode_seqs_do_not_use_up_the_chunk_budget(pool: BlockPool) -> None:
    running = [landed(pool, number, 2) for number in range(6)]
    plan = planned(running, [asked(9, 10)], pool, chunk_tokens=4)
    assert [num_tokens for *_, num_tokens in scheduled(plan)] == [1] * 6 + [4]


def test_the_last_ranked_holder_is_preempted_when_the_pool_is_dry(pool: BlockPool) -> None:
    requests = [landed(pool, 0, 4), landed(pool, 1, 7), landed(pool, 2, 7)]
    leave_free(pool, 0)
    plan = planned(requests, [], pool)
    assert plan.preempted == (requests[2],)
    assert scheduled(plan) == [(requests[0], 0, 1), (requests[1], 0, 1)]


def test_a_lower_priority_is_preempted_before_a_later_arrival(pool: BlockPool) -> None:
    humble, urgent_late = landed(pool, 0, 7), landed(pool, 1, 8, priority=5)
    leave_free(pool, 0)
    plan = planned([urgent_late, humble], [], pool)
    assert plan.preempted == (humble,)
    assert scheduled(plan) == [(urgent_late, 0, 1)]


def test_a_request_with_nobody_behind_it_sits_out_instead_of_being_preempted(pool: BlockPool) -> None:
    first, last = landed(pool, 0, 3), landed(pool, 1, 4)
    leave_free(pool, 0)
    plan = planned([first, last], [], pool)
    assert scheduled(plan) == [(first, 0, 1)]
    assert plan.preempted == ()
    assert plan.lacks_blocks


def test_a_landed_sequence_joins_at_once_without_head_room(pool: BlockPool) -> None:
    running, arrived = landed(pool, 0, 3), landed(pool, 1, 3)
    leave_free(pool, 0)
    plan = planned([running], [arrived], pool)
    assert plan.admitted == (arrived,)
    assert scheduled(plan) == [(running, 0, 1), (arrived, 0, 1)]
    assert not plan.lacks_blocks


def test_a_landed_sequence_that_waits_for_a_seat_gives_up_its_blocks_to_an_earlier_one(pool: BlockPool) -> None:
    running, arrived = landed(pool, 0, 4), landed(pool, 1, 3)
    leave_free(pool, 0)
    plan = planned([running], [arrived], pool, max_seqs=1)
    assert plan.preempted == (arrived,)
    assert scheduled(plan) == [(running, 0, 1)]


@pytest.mark.parametrize(("num_free", "runs", "admits"), [(3, True, False), (4, True, True), (2, False, True)])
def test_a_prompt_waits_until_it_fits_with_head_room_unless_it_is_alone(
    pool: BlockPool, num_free: int, runs: bool, admits: bool
) -> None:
    running = [landed(pool, 0, 3)] if runs else []
    leave_free(pool, num_free)
    assert bool(planned(running, [asked(1, 8)], pool).admitted) == admits


def test_prompts_are_not_overtaken_by_shorter_ones(pool: BlockPool) -> None:
    running = landed(pool, 0, 3)
    leave_free(pool, 20)
    assert planned([running], [asked(1, 400), asked(2, 2)], pool).admitted == ()


# --- groups ---


def test_hand_offs_that_go_on_landing_take_seats_before_a_prompt_a_bounded_number_of_times(pool: BlockPool) -> None:
    running, prompt = landed(pool, 0, 3), asked(1, 4)
    for number in range(MAX_OVERTAKES):
        late = landed(pool, 2 + number, 3)
        plan = planned([running], [prompt, late], pool, max_seqs=2)
        assert plan.admitted == (late,)
        note_overtaken([prompt], plan.admitted)
        pool.release(late.group.take_blocks()[0])
    late = landed(pool, 99, 3)
    assert planned([running], [prompt, late], pool, max_seqs=2).admitted == (prompt,)
    small = asked(98, 1)
    leave_free(pool, 1)
    assert planned([running], [prompt, small, late], pool, max_seqs=8).admitted == (late,)


def test_a_group_without_room_holds_no_seats_back_however_often_it_was_overtaken(pool: BlockPool) -> None:
    running, group, late = landed(pool, 0, 3), asked(1, 40, n=3), landed(pool, 2, 3)
    group.num_overtaken = MAX_OVERTAKES
    leave_free(pool, 1)
    assert planned([running], [group, late], pool, max_seqs=2).admitted == (late,)


def test_a_group_takes_a_seat_for_each_choice(pool: BlockPool) -> None:
    running, group = landed(pool, 0, 3), landed(pool, 1, 3, n=3)
    assert planned([running], [group], pool, max_seqs=3).admitted == ()
    assert planned([running], [group], pool, max_seqs=4).admitted == (group,)


def test_a_shared_block_is_copied_for_all_holders_but_the_last(pool: BlockPool) -> None:
    group = landed(pool, 0, 6, n=3)
    leave_free(pool, 2)
    plan = planned([group], [], pool)
    assert scheduled(plan) == [(group, 0, 1), (group, 1, 1), (group, 2, 1)]
    assert not plan.lacks_blocks


def test_a_choice_without_a_block_for_its_copy_sits_out(pool: BlockPool) -> None:
    group = landed(pool, 0, 6, n=3)
    leave_free(pool, 1)
    plan = planned([group], [], pool)
    assert scheduled(plan) == [(group, 0, 1)]
    assert plan.lacks_blocks


def test_a_preempted_group_is_credited_with_the_blocks_that_it_alone_holds(pool: BlockPool) -> None:
    first, victim = landed(pool, 0, 8, n=2), landed(pool, 1, 7, n=3)
    pool.retain(victim.group.sequences[0].block_table[:1])  # as a prefix cache would
    leave_free(pool, 0)
    plan = planned([first, victim], [], pool)
    assert plan.preempted == (victim,)
    assert scheduled(plan) == [(first, 0, 1)], "one block comes back, however many choices held it"


def test_a_prompt_of_several_choices_is_computed_once(pool: BlockPool) -> None:
    group = asked(0, 6, n=3)
    assert scheduled(planned([], [group], pool)) == [(group, -1, 6)]


def test_resumed_choices_compute_their_tokens_under_the_chunk_budget(pool: BlockPool) -> None:
    group = asked(0, 8, n=2, emitted=10)
    group.group.land(pool.allocate(2), {}, pool)
    assert scheduled(planned([group], [], pool, chunk_tokens=16)) == [(group, 0, 10), (group, 1, 6)]


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
    assert scheduled(planned([ending, going], [], pool)) == [(going, 0, 1)]


def test_a_sequence_that_needs_its_last_token_on_the_host_sits_out_one_plan(pool: BlockPool) -> None:
    masked, plain = landed(pool, 0, 3), landed(pool, 1, 3)
    (seq,) = masked.group.sequences
    seq.runs_ahead = False
    assert len(planned([masked, plain], [], pool).scheduled) == 2
    step_all(pool, masked, plain)
    assert scheduled(planned([masked, plain], [], pool)) == [(plain, 0, 1)]
    seq.append_token(TokenId(1))
    assert len(planned([masked, plain], [], pool).scheduled) == 2


def test_a_prefix_whose_first_tokens_are_pending_is_left_out(pool: BlockPool) -> None:
    group = asked(0, 1, n=2)
    step_all(pool, group)
    assert scheduled(planned([group], [], pool)) == []
