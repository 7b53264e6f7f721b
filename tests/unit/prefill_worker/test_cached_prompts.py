"""A prefill worker's prompts and its prefix cache: what is found is not computed, and goes to the transfer at once."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.types import FinishReason


def computed(bench: Any, first_batch: int = 0) -> list[tuple[int, int]]:
    """Where each chunk began, and its tokens."""
    return [(seq.context_len, len(seq.token_ids)) for batch in bench.engine.batches[first_batch:] for seq in batch]


async def handed_off(bench: Any, *handles: int) -> None:
    await bench.router.until(lambda: all(handle in bench.router.handoffs for handle in handles))


async def test_a_prompt_that_was_computed_before_computes_its_last_tokens_alone(bench: Any, make_spec: Any) -> None:
    await handed_off(bench, bench.prefill(1, make_spec(22)))
    first_table = tuple(bench.engine.batches[-1][0].block_table)
    await bench.settles()
    num_batches = len(bench.engine.batches)

    again = bench.prefill(2, make_spec(22))

    await handed_off(bench, again)
    assert computed(bench, num_batches) == [(20, 2)]
    assert tuple(bench.engine.batches[-1][0].block_table)[:5] == first_table[:5]
    assert bench.router.first_tokens[again].token_ids == bench.router.first_tokens[1].token_ids
    assert bench.router.cached_tokens == {1: 0, again: 20}
    assert [sequence.args("PrefixLookedUp") for sequence in bench.recorded.sequences] == [(22, 0), (22, 20)]
    pushed = [first + i for first, blocks in bench.sender.handoffs[-1].pushes for i in range(len(blocks))]
    assert pushed == list(range(6))


async def test_of_a_prompt_that_fills_its_blocks_the_last_one_is_computed_again(bench: Any, make_spec: Any) -> None:
    await handed_off(bench, bench.prefill(1, make_spec(12)))
    await handed_off(bench, bench.prefill(2, make_spec(12)))
    assert computed(bench)[-1] == (8, 4)
    assert bench.router.cached_tokens[2] == 8


async def test_found_blocks_are_pushed_while_the_rest_computes(bench: Any, make_spec: Any) -> None:
    await handed_off(bench, bench.prefill(1, make_spec(10)))
    table = tuple(bench.engine.batches[-1][0].block_table)
    bench.engine.gate.close()
    num_arrived = bench.sender.push_gate.num_arrived
    bench.prefill(2, make_spec(14))
    await bench.sender.push_gate.reached(num_arrived + 1)
    assert bench.sender.handoffs[-1].pushes == [(0, table[:2])]
    assert 2 not in bench.router.firsts


async def test_what_decode_holds_of_the_found_blocks_is_not_pushed(bench: Any, make_spec: Any) -> None:
    await handed_off(bench, bench.prefill(1, make_spec(22)))
    bench.sender.first_block = 3
    await handed_off(bench, bench.prefill(2, make_spec(22)))
    assert bench.sender.handoffs[-1].pushes[0][0] == 3
    assert sum(len(blocks) for _, blocks in bench.sender.handoffs[-1].pushes) == 3


async def test_another_salt_finds_nothing(bench: Any, make_spec: Any) -> None:
    for handle, salt in enumerate(("", "a", "b", "a"), 1):
        await handed_off(bench, bench.prefill(handle, make_spec(14, cache_salt=salt)))
    assert bench.router.cached_tokens == {1: 0, 2: 0, 3: 0, 4: 12}


async def test_the_output_of_a_resumed_choice_is_found_too_but_counts_for_no_prompt(bench: Any, make_spec: Any) -> None:
    await handed_off(bench, bench.prefill(1, make_spec(20)))
    resumed = bench.prefill(2, make_spec(6, num_output_tokens=[12], max_tokens=20))
    await handed_off(bench, resumed)
    assert computed(bench)[-1] == (16, 2)
    assert bench.router.cached_tokens[resumed] == 6


async def test_all_choices_of_a_request_draw_from_a_found_prefix(bench: Any, make_spec: Any) -> None:
    await handed_off(bench, bench.prefill(1, make_spec(10)))
    await handed_off(bench, bench.prefill(2, make_spec(10, num_output_tokens=[0, 0, 0])))
    assert computed(bench)[-1] == (8, 2)
    assert {index: delta.token_ids for index, delta in bench.router.firsts[2].items()} == {
        0: (20,),
        1: (21,),
        2: (22,),
    }


async def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole(bench: Any, make_spec: Any) -> None:
    await handed_off(bench, bench.prefill(1, make_spec(10)))
    await handed_off(bench, bench.prefill(2, make_spec(10, prompt_logprobs=1)))
    assert computed(bench) == [(0, 8), (8, 2)] * 2
    assert bench.router.cached_tokens[2] == 0
    assert "PrefixLookedUp" not in bench.recorded.sequences[1].names


async def test_a_cache_that_is_off_finds_nothing(make_bench: Any, make_spec: Any) -> None:
    bench = make_bench(cached=False)
    for handle in (1, 2):
        await handed_off(bench, bench.prefill(handle, make_spec(10)))
    assert bench.router.cached_tokens == {1: 0, 2: 0}
    assert bench.pool.num_free == 16


async def test_what_a_failed_step_wrote_is_not_known(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    bench.prefill(1, make_spec(16))
    await bench.engine.gate.let_one_pass()
    await bench.engine.gate.reached(2)
    bench.engine.error = RuntimeError("broken")
    await bench.engine.gate.open()
    await bench.router.until(lambda: 1 in bench.router.errors)
    await handed_off(bench, bench.prefill(2, make_spec(16)))
    assert bench.router.cached_tokens[2] == 8


async def test_a_prompt_whose_logits_break_leaves_nothing_known(bench: Any, make_spec: Any) -> None:
    bench.engine.broken_length = 22
    bench.prefill(1, make_spec(22))
    await bench.router.until(lambda: 1 in bench.router.errors)
    await handed_off(bench, bench.prefill(2, make_spec(21)))
    assert bench.router.cached_tokens[2] == 0


async def test_a_prompt_whose_log_probabilities_break_leaves_nothing_known(bench: Any, make_spec: Any) -> None:
    bench.engine.broken_score = 18  # of the third step
    bench.prefill(1, make_spec(22, prompt_logprobs=1))
    await bench.router.until(lambda: 1 in bench.router.errors)
    await handed_off(bench, bench.prefill(2, make_spec(22)))
    assert bench.router.cached_tokens[2] == 0


async def test_what_was_computed_of_a_released_prompt_is_known(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    handle = bench.prefill(1, make_spec(20))
    await bench.engine.gate.let_one_pass()
    await bench.engine.gate.reached(2)
    bench.worker.release(bench.router, handle)
    await bench.engine.gate.open()
    await bench.settles()
    await handed_off(bench, bench.prefill(2, make_spec(20)))
    assert bench.router.cached_tokens[2] == 16


async def test_a_prompt_that_needs_the_whole_pool_finds_room_where_all_is_cached(bench: Any, make_spec: Any) -> None:
    await handed_off(bench, bench.prefill(1, make_spec(60, max_tokens=2)))
    assert bench.pool.num_cached == 15
    other = make_spec(62, cache_salt="other", max_tokens=2)
    await handed_off(bench, bench.prefill(2, other))
    assert bench.router.cached_tokens[2] == 0
    await handed_off(bench, bench.prefill(3, make_spec(62, max_tokens=2)))
    assert bench.router.cached_tokens[3] == 0


async def test_found_blocks_leave_less_room_for_others(bench: Any, make_spec: Any) -> None:
    """16 blocks: 8 of them cached, which the first two prompts share; the third needs 9 and must wait for both."""
    await handed_off(bench, bench.prefill(1, make_spec(32)))
    bench.sender.commit_gate.close()
    bench.sender.push_gate.close()
    bench.prefill(2, make_spec(34))
    bench.prefill(3, make_spec(34))
    await bench.router.until(lambda: {2, 3} <= set(bench.router.first_tokens))
    bench.prefill(4, make_spec(34, cache_salt="other"))
    await bench.sender.push_gate.reached(1)
    assert bench.worker.load().waiting_seqs == 1
    assert bench.worker.load().pool.live == 10
    await bench.sender.push_gate.open()
    await bench.sender.commit_gate.open()
    await handed_off(bench, 2, 3, 4)
    await bench.settles()


async def test_equal_prompts_that_come_together_are_computed_once_but_for_the_first_step(
    bench: Any, make_spec: Any
) -> None:
    bench.engine.gate.close()
    for handle in range(1, 5):
        bench.prefill(handle, make_spec(10))
    await bench.engine.gate.open()
    await handed_off(bench, 1, 2, 3, 4)
    assert sum(num_tokens for _, num_tokens in computed(bench)) <= 8 + 8 + 4 * 2
    assert sorted(bench.router.cached_tokens.values())[-2:] == [8, 8]
    assert len({delta.token_ids for delta in bench.router.first_tokens.values()}) == 1


async def test_the_line_counts_what_is_left_to_compute(bench: Any, make_spec: Any) -> None:
    await handed_off(bench, bench.prefill(1, make_spec(30)))
    bench.engine.gate.close()
    bench.prefill(2, make_spec(8, cache_salt="other"))
    arrived = bench.engine.gate.num_arrived
    await bench.engine.gate.reached(arrived + 1)
    bench.prefill(3, make_spec(30))
    assert bench.worker.load().queued_prompt_tokens == 8 + 2
    await bench.engine.gate.open()
    await handed_off(bench, 2, 3)


@pytest.mark.parametrize("max_tokens", [1, 4])
async def test_a_second_turn_finds_the_first_one(bench: Any, make_spec: Any, max_tokens: int) -> None:
    bench.prefill(1, make_spec(20, max_tokens=max_tokens))
    await bench.router.until(lambda: 1 in bench.router.first_tokens)
    await bench.settles()
    assert (bench.router.first_tokens[1].finish_reason is FinishReason.LENGTH) == (max_tokens == 1)
    await handed_off(bench, bench.prefill(2, make_spec(30)))
    assert bench.router.cached_tokens[2] == 20


async def test_what_was_evicted_to_the_host_comes_back_before_it_is_read_or_pushed(
    make_bench: Any, make_spec: Any
) -> None:
    bench = make_bench(host_rows=40)
    await handed_off(bench, bench.prefill(1, make_spec(40)))
    await handed_off(bench, bench.prefill(2, make_spec(60, cache_salt="other", max_tokens=2)))
    num_batches = len(bench.engine.batches)
    bench.engine.gate.close()
    num_pushes = bench.sender.push_gate.num_arrived
    again = bench.prefill(3, make_spec(44))
    await bench.engine.gate.reached(bench.engine.num_steps + 1)
    await bench.engine.gate.open()
    await handed_off(bench, again)
    assert computed(bench, num_batches) == [(40, 4)]
    assert bench.router.cached_tokens[again] == 40
    assert bench.sender.push_gate.num_arrived > num_pushes
    await bench.settles()


async def test_what_a_failed_step_was_to_bring_back_holds_no_blocks(make_bench: Any, make_spec: Any) -> None:
    bench = make_bench(host_rows=40)
    await handed_off(bench, bench.prefill(1, make_spec(40)))
    await handed_off(bench, bench.prefill(2, make_spec(60, cache_salt="other", max_tokens=2)))
    bench.engine.error = RuntimeError("broken")
    bench.prefill(3, make_spec(44))
    await bench.router.until(lambda: 3 in bench.router.errors)
    await bench.settles()
    await handed_off(bench, bench.prefill(4, make_spec(44)))
