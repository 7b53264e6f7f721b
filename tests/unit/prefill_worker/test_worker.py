"""The prefill worker among fakes: every way a prompt can go, and that nothing of it stays."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import (
    InvalidRequest,
    PeerLost,
    TicketRefused,
    TransferError,
)


async def test_a_prompt_gives_its_first_token_and_then_its_blocks(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(10))
    await bench.router.until(lambda: handle in bench.router.handoffs)
    (handoff,) = bench.sender.handoffs
    assert bench.router.first_tokens[handle].token_ids == (20,)
    assert bench.router.first_tokens[handle].offset == 0
    assert bench.router.handoffs[handle] == (300, 0.25)
    assert handoff.committed == {0: 20}
    await bench.settles()


async def test_the_blocks_go_in_the_order_of_positions_each_once(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(23))
    await bench.router.until(lambda: handle in bench.router.handoffs)
    (handoff,) = bench.sender.handoffs
    table = tuple(bench.engine.batches[-1][0].block_table)
    position = 0
    for first, blocks in handoff.pushes:
        assert first == position
        assert blocks == (table or blocks)[first : first + len(blocks)]
        position += len(blocks)
    assert position == 6


@pytest.mark.parametrize("held", [1, 3, 5, 6])
async def test_blocks_that_the_decode_worker_holds_already_are_not_pushed(
    bench: Any, make_spec: Any, held: int
) -> None:
    bench.sender.first_block = held
    handle = bench.prefill(1, make_spec(23))
    await bench.router.until(lambda: handle in bench.router.handoffs)
    (handoff,) = bench.sender.handoffs
    pushed = [first + i for first, blocks in handoff.pushes for i in range(len(blocks))]
    assert pushed == list(range(held, 6))
    assert all(held <= first for first, _ in handoff.pushes)
    await bench.settles()


async def test_full_blocks_are_pushed_while_the_next_chunk_computes(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    bench.prefill(1, make_spec(20))
    await bench.engine.gate.let_one_pass()
    await bench.sender.push_gate.reached(1)
    assert bench.sender.handoffs[0].pushes == [(0, tuple(bench.engine.batches[0][0].block_table[:2]))]
    assert bench.engine.num_steps == 1


async def test_a_block_that_is_not_full_is_not_lent_before_the_end(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    bench.prefill(1, make_spec(5))
    bench.prefill(2, make_spec(7))
    await bench.engine.gate.let_one_pass()
    await bench.engine.gate.reached(2)
    await bench.sender.push_gate.reached(1)
    sent = {handoff.ticket: sum(len(blocks) for _, blocks in handoff.pushes) for handoff in bench.sender.handoffs}
    assert sent == {b"ticket-1": 2, b"ticket-2": 0}


async def test_many_prompts_share_steps_and_all_come_back(bench: Any, make_spec: Any) -> None:
    handles = [bench.prefill(n, make_spec(n)) for n in range(1, 20)]
    await bench.router.until(lambda: len(bench.router.handoffs) == len(handles))
    assert {h: bench.router.first_tokens[h].token_ids[0] for h in handles} == {n: 2 * n for n in handles}
    assert any(len(batch) > 1 for batch in bench.engine.batches)
    assert all(sum(len(seq.token_ids) for seq in batch) <= 8 for batch in bench.engine.batches)
    await bench.settles()


async def test_the_first_token_does_not_wait_for_the_transfer(bench: Any, make_spec: Any) -> None:
    bench.sender.open_gate.close()
    handle = bench.prefill(1, make_spec(10))
    await bench.router.until(lambda: handle in bench.router.first_tokens)
    assert handle not in bench.router.handoffs
    assert bench.cache.num_available == 13
    await bench.sender.open_gate.open()
    await bench.router.until(lambda: handle in bench.router.handoffs)
    await bench.settles()


async def test_a_resumed_sequence_continues_at_its_offset(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(8, num_output_tokens=[2], max_tokens=4))
    await bench.router.until(lambda: handle in bench.router.handoffs)
    assert bench.router.first_tokens[handle].offset == 2
    (sample,) = bench.engine.batches[-1][0].samples
    assert sample.output_index == 2
    assert bench.sender.handoffs[0].committed == {0: 20}


async def test_times_tell_waiting_from_computing(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    bench.prefill(1, make_spec(8))
    await bench.engine.gate.reached(1)
    handle = bench.prefill(2, make_spec(8))
    bench.clock.advance_s(2.0)
    await bench.engine.gate.open()
    await bench.engine.gate.reached(2)
    await bench.router.until(lambda: handle in bench.router.first_tokens)
    assert bench.router.times_s == {1: (0.0, 2.0), 2: (2.0, 0.0)}


async def test_a_prompt_waits_until_its_blocks_are_free(bench: Any, make_spec: Any) -> None:
    bench.sender.commit_gate.close()
    bench.sender.push_gate.close()
    first, second = bench.prefill(1, make_spec(60, priority=1)), bench.prefill(2, make_spec(8, cache_salt="other"))
    await bench.router.until(lambda: first in bench.router.first_tokens)
    assert bench.worker.load().waiting_seqs == 1
    await bench.sender.push_gate.open()
    await bench.router.until(lambda: second in bench.router.first_tokens)
    await bench.sender.commit_gate.open()
    await bench.router.until(lambda: len(bench.router.handoffs) == 2)
    await bench.settles()


@pytest.mark.parametrize("gate", ["open_gate", "push_gate", "commit_gate"])
async def test_released_while_the_sender_is_busy_gives_everything_back(bench: Any, make_spec: Any, gate: str) -> None:
    getattr(bench.sender, gate).close()
    handle = bench.prefill(1, make_spec(20))
    await getattr(bench.sender, gate).reached(1)
    bench.worker.release(bench.router, handle)
    await bench.settles()
    assert bench.router.handoffs == bench.router.errors == {}
    assert all(handoff.num_aborts == 1 for handoff in bench.sender.handoffs)


async def test_released_while_waiting_is_never_computed(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    bench.prefill(1, make_spec(8))
    await bench.engine.gate.reached(1)
    waiting = bench.prefill(2, make_spec(8))
    bench.worker.release(bench.router, waiting)
    await bench.engine.gate.open()
    await bench.settles()
    assert waiting not in bench.router.first_tokens
    assert len(bench.engine.batches) == 1


async def test_blocks_of_a_running_step_come_back_only_after_it(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    handle = bench.prefill(1, make_spec(8))
    await bench.engine.gate.reached(1)
    bench.worker.release(bench.router, handle)
    assert bench.cache.num_available == 14
    await bench.engine.gate.open()
    await bench.settles()
    assert bench.router.first_tokens == {}


async def test_lent_blocks_come_back_only_after_the_sender_has_let_go(bench: Any, make_spec: Any) -> None:
    bench.sender.push_gate.close()
    bench.sender.abort_gate.close()
    handle = bench.prefill(1, make_spec(8))
    await bench.sender.push_gate.reached(1)
    bench.worker.release(bench.router, handle)
    await bench.sender.abort_gate.reached(1)
    bench.worker.release(bench.router, handle)
    assert bench.cache.num_available == 14
    await bench.sender.abort_gate.open()
    await bench.settles()


async def test_release_of_an_unknown_handle_is_nothing(bench: Any) -> None:
    bench.worker.release(bench.router, 99)
    bench.worker.check_idle()


async def test_a_lost_router_frees_its_own_prompts_and_no_others(bench: Any, make_spec: Any, other_router: Any) -> None:
    bench.engine.gate.close()
    for n in range(1, 6):
        bench.prefill(n, make_spec(12))
    kept = bench.prefill(1, make_spec(12), router=other_router)
    await bench.engine.gate.reached(1)
    bench.worker.router_lost(bench.router)
    await bench.engine.gate.open()
    await other_router.until(lambda: kept in other_router.handoffs)
    await bench.settles()
    assert bench.router.first_tokens == bench.router.errors == {}


async def test_a_bad_ticket_fails_before_the_prompt_is_computed(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    bench.prefill(1, make_spec(8))
    await bench.engine.gate.reached(1)
    bench.sender.errors["open"] = TicketRefused("stale")
    bad = bench.prefill(2, make_spec(8))
    await bench.router.until(lambda: bad in bench.router.errors)
    assert isinstance(bench.router.errors[bad], TicketRefused)
    await bench.engine.gate.open()
    await bench.settles()
    assert len(bench.engine.batches) == 1


@pytest.mark.parametrize("call", ["push", "commit"])
async def test_a_failing_transfer_is_reported_as_retryable_and_frees_everything(
    bench: Any, make_spec: Any, call: str
) -> None:
    bench.sender.errors[call] = PeerLost("connection reset")
    handle = bench.prefill(1, make_spec(20))
    await bench.router.until(lambda: handle in bench.router.errors)
    assert bench.router.errors[handle].retryable
    assert handle not in bench.router.handoffs
    await bench.settles()
    assert bench.sender.handoffs[0].num_aborts == 1


async def test_a_failing_transfer_and_a_release_in_its_wake_report_once(bench: Any, make_spec: Any) -> None:
    bench.sender.abort_gate.close()
    bench.sender.errors["push"] = PeerLost("connection reset")
    handle = bench.prefill(1, make_spec(8))
    await bench.sender.abort_gate.reached(1)
    bench.worker.release(bench.router, handle)
    await bench.sender.abort_gate.open()
    await bench.settles()
    assert bench.router.errors == {}


async def test_a_destination_that_takes_no_blocks_leaves_room_for_others(bench: Any, make_spec: Any) -> None:
    """16 blocks: five prompts of 4 blocks to one that grants nothing, then one to another."""
    stuck = [bench.prefill(n, make_spec(16), grant=False, destination="slow") for n in range(1, 6)]
    first = bench.prefill(6, make_spec(4), destination="fast")
    await bench.router.until(lambda: first in bench.router.handoffs)
    for handle in range(7, 10):
        large = bench.prefill(handle, make_spec(24), destination="fast")
        await bench.router.until(lambda handle=large: handle in bench.router.handoffs)
    assert [handle for handle in stuck if handle in bench.router.started] == stuck[:2]
    for handle in stuck:
        bench.grant(handle)
    await bench.router.until(lambda: all(handle in bench.router.handoffs for handle in stuck))
    await bench.settles()


async def test_a_bug_in_the_transfer_is_a_failed_transfer_and_frees_everything(bench: Any, make_spec: Any) -> None:
    bench.sender.errors["push"] = KeyError("oops")
    handle = bench.prefill(1, make_spec(8))
    await bench.router.until(lambda: handle in bench.router.errors)
    assert isinstance(bench.router.errors[handle], TransferError)  # so it is computed again
    await bench.settles()


async def test_a_broken_step_says_nothing_to_a_released_prompt(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    bench.engine.error = RuntimeError("out of memory")
    handle = bench.prefill(1, make_spec(4))
    await bench.engine.gate.reached(1)
    bench.worker.release(bench.router, handle)
    await bench.engine.gate.open()
    await bench.settles()
    assert bench.router.errors == {}


async def test_a_wrong_spec_is_refused_by_field_and_holds_nothing(bench: Any, make_spec: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bench.prefill(1, make_spec(65, max_tokens=4))
    assert caught.value.field == "prompt"
    bench.worker.check_idle()


async def test_a_prompt_that_fills_the_pool_is_computed_however_long_its_completion(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(64, max_tokens=150))
    await bench.router.until(lambda: handle in bench.router.handoffs)
    await bench.settles()


async def test_reserve_is_refused(bench: Any, make_spec: Any) -> None:
    with pytest.raises(InvalidRequest):
        bench.worker.reserve(bench.router, 1, make_spec(8), local_prefill=False)


async def test_load_counts_what_waits_runs_and_moves(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    for n in range(1, 7):
        bench.prefill(n, make_spec(8), grant=n <= 3)
    await bench.engine.gate.reached(1)
    load = bench.worker.load()
    assert (load.running_seqs, load.waiting_seqs, load.queued_prompt_tokens) == (4, 2, 48)
    assert (load.pool.live, load.live_transfers, load.engine_steps) == (8, 3, 0)
    for n in range(4, 7):
        bench.grant(n)
