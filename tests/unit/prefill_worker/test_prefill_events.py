"""What a prefill worker emits of each prompt and each step."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import PeerLost, TicketRefused


async def test_a_prompt_is_told_from_arrival_to_its_commit(bench: Any, make_spec: Any) -> None:
    spec = make_spec(10)
    bench.prefill(1, spec)
    await bench.settles()
    (sequence,) = bench.recorded.sequences
    assert sequence.spec is spec
    assert sorted(sequence.names[:-2]) == ["FirstToken", "PrefixLookedUp", "Started", "TransferStarted"]
    assert sequence.calls[-2:] == [("Transferred", 300, 0.25, "fake", 0), ("SequenceEnded", None, 1)]


async def test_the_transfer_starts_with_the_first_blocks_not_with_the_ticket(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    bench.prefill(1, make_spec(10))
    await bench.engine.gate.reached(1)
    await bench.sender.open_gate.reached(1)
    assert bench.recorded.sequences[0].names == ["PrefixLookedUp", "Started"]
    await bench.engine.gate.let_one_pass()
    await bench.sender.push_gate.reached(1)
    assert bench.recorded.sequences[0].names == ["PrefixLookedUp", "Started", "TransferStarted"]


async def test_a_step_is_told_while_its_prompts_are_still_there(bench: Any, make_spec: Any) -> None:
    names_at_step: list[list[str]] = []
    bench.recorded.on_step = lambda: names_at_step.append(bench.recorded.sequences[0].names)
    bench.prefill(1, make_spec(3))
    await bench.settles()
    assert names_at_step == [["PrefixLookedUp", "Started"]]


@pytest.mark.parametrize(("call", "error"), [("open", TicketRefused("no")), ("push", PeerLost("gone"))])
async def test_a_failed_hand_off_ends_with_its_error(bench: Any, make_spec: Any, call: str, error: Exception) -> None:
    bench.sender.errors[call] = error
    bench.prefill(1, make_spec(10))
    await bench.settles()
    sequence = bench.recorded.sequences[0]
    assert sequence.args("SequenceEnded")[0] is error
    assert "Transferred" not in sequence.names


async def test_a_drained_worker_has_told_every_end(bench: Any, make_spec: Any) -> None:
    for number in range(4):
        bench.prefill(number, make_spec(9))
    bench.worker.drain()
    await bench.settles()
    assert [sequence.names[-2:] for sequence in bench.recorded.sequences] == [["Transferred", "SequenceEnded"]] * 4
