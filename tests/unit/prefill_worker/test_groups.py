"""Requests of several choices on a prefill worker: one prompt, one hand-off, a first token each."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import InvalidRequest
from tandem.types import FinishReason


def told(bench: Any, handle: Any) -> dict[int, tuple[int, int, FinishReason | None]]:
    """Offset, token and finish reason of each choice's first token."""
    return {
        index: (delta.offset, delta.token_ids[0], delta.finish_reason)
        for index, delta in bench.router.firsts[handle].items()
    }


async def test_all_choices_draw_from_one_computation_of_the_prompt(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(10, num_output_tokens=[0, 0, 0]))
    await bench.router.until(lambda: handle in bench.router.handoffs)

    assert [[len(seq.token_ids) for seq in batch] for batch in bench.engine.batches] == [[8], [2]]
    assert [len(batch[0].samples) for batch in bench.engine.batches] == [0, 3]
    assert told(bench, handle) == {0: (0, 20, None), 1: (0, 21, None), 2: (0, 22, None)}
    (handoff,) = bench.sender.handoffs
    assert handoff.committed == {0: 20, 1: 21, 2: 22}
    assert bench.router.handoffs[handle] == (300, 0.25)
    await bench.settles()
    assert bench.recorded.sequences[0].args("SequenceEnded") == (None, 3)


async def test_a_choice_that_ends_with_its_first_token_does_not_end_the_others(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(10, num_output_tokens=[0, 0, 0], end_token_ids=frozenset({21})))
    await bench.router.until(lambda: handle in bench.router.handoffs)

    assert told(bench, handle) == {0: (0, 20, None), 1: (0, 21, FinishReason.STOP), 2: (0, 22, None)}
    assert bench.sender.handoffs[0].committed == {0: 20, 1: 21, 2: 22}
    await bench.settles()


async def test_when_every_choice_ends_with_its_first_token_nothing_is_committed(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(10, num_output_tokens=[0, 0], max_tokens=1))
    await bench.settles()

    assert told(bench, handle) == {0: (0, 20, FinishReason.LENGTH), 1: (0, 21, FinishReason.LENGTH)}
    assert bench.router.handoffs == bench.router.errors == {}
    assert all(handoff.committed is None for handoff in bench.sender.handoffs)
    assert bench.recorded.sequences[0].calls[-2:] == [("FirstToken",), ("SequenceEnded", None, 2)]


async def test_of_several_choices_those_that_are_resumed_draw_nothing_here(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(10, num_output_tokens=[2, 0, 1]))
    await bench.router.until(lambda: handle in bench.router.handoffs)

    assert sum(len(seq.token_ids) for batch in bench.engine.batches for seq in batch) == 10
    assert told(bench, handle) == {1: (0, 21, None)}
    assert bench.sender.handoffs[0].committed == {1: 21}
    await bench.settles()


async def test_a_group_that_is_resumed_whole_is_committed_without_tokens(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(10, num_output_tokens=[2, 1]))
    await bench.router.until(lambda: handle in bench.router.handoffs)

    assert bench.router.times_s[handle] is not None
    assert told(bench, handle) == {}
    assert all(seq.samples == () for batch in bench.engine.batches for seq in batch)
    assert bench.sender.handoffs[0].committed == {}
    await bench.settles()
    assert bench.recorded.sequences[0].args("SequenceEnded") == (None, 0)


async def test_a_group_with_a_resumed_choice_goes_on_when_its_new_choices_end(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(10, num_output_tokens=[2, 0], end_token_ids=frozenset({21})))
    await bench.router.until(lambda: handle in bench.router.handoffs)

    assert told(bench, handle) == {1: (0, 21, FinishReason.STOP)}
    assert bench.sender.handoffs[0].committed == {1: 21}
    await bench.settles()


async def test_choices_whose_logits_break_fail_as_one_request(bench: Any, make_spec: Any) -> None:
    bench.engine.broken_length = 5
    good, bad = bench.prefill(1, make_spec(3)), bench.prefill(2, make_spec(5, num_output_tokens=[0, 0]))
    await bench.router.until(lambda: good in bench.router.handoffs and bad in bench.router.errors)
    assert bad not in bench.router.firsts
    await bench.settles()


async def test_blocks_lent_before_the_offer_was_known_are_given_back_where_decode_holds_them(
    bench: Any, make_spec: Any
) -> None:
    bench.sender.first_block = 3
    bench.sender.open_gate.close()
    handle = bench.prefill(1, make_spec(22))
    await bench.router.until(lambda: handle in bench.router.firsts)
    assert bench.cache.num_available == 10
    bench.sender.push_gate.close()
    await bench.sender.open_gate.open()
    await bench.sender.push_gate.reached(1)

    (handoff,) = bench.sender.handoffs
    assert [(first, len(blocks)) for first, blocks in handoff.pushes] == [(3, 3)]
    assert bench.cache.num_available == 13
    await bench.sender.push_gate.open()
    await bench.router.until(lambda: handle in bench.router.handoffs)
    assert handoff.committed == {0: 44}
    await bench.settles()


async def test_an_offer_without_blocks_is_a_transfer_all_the_same(bench: Any, make_spec: Any) -> None:
    bench.sender.first_block = 3
    handle = bench.prefill(1, make_spec(10))
    await bench.router.until(lambda: handle in bench.router.handoffs)

    (handoff,) = bench.sender.handoffs
    assert (handoff.pushes, handoff.committed) == ([], {0: 20})
    await bench.settles()
    assert sorted(bench.recorded.sequences[0].names[:-2]) == [
        "FirstToken",
        "PrefixLookedUp",
        "Started",
        "TransferStarted",
    ]


@pytest.mark.parametrize("num_output_tokens", [(), (4,), (0, 4)])
async def test_choices_that_cannot_be_are_refused(bench: Any, make_spec: Any, num_output_tokens: tuple[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bench.prefill(1, make_spec(10, num_output_tokens=num_output_tokens, max_tokens=4))
    assert caught.value.field == "choices"
    bench.worker.check_idle()
