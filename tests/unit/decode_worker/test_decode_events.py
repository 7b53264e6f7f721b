"""What a decode worker emits of each sequence and each step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.errors import InternalError, TransferError


async def test_a_handed_off_sequence_is_told_from_arrival_to_its_last_token(open_bench: Any, make_spec: Any) -> None:
    async with open_bench() as bench:
        spec = make_spec(9, 7)
        handle = bench.reserve(1, spec)
        ticket = await bench.ticket(handle)
        bench.receiver.show(ticket)
        bench.clock.advance_s(0.5)
        bench.hand_off(ticket, spec)
        await bench.settled()
    (sequence,) = bench.recorded.sequences
    assert sequence.spec is spec
    assert sequence.story == [
        "BlocksReserved",
        "PrefixLookedUp",
        "TransferStarted",
        "Transferred",
        "Started",
        "SequenceEnded",
    ]
    assert sequence.args("Transferred") == (0, 0.5, None, 0)
    assert sequence.args("SequenceEnded") == (None, 6)


async def test_a_local_prompt_is_told_with_its_first_token(open_bench: Any, make_spec: Any) -> None:
    async with open_bench(chunk_tokens=4) as bench:
        bench.reserve(1, make_spec(13, 5), local_prefill=True)
        await bench.settled()
    (sequence,) = bench.recorded.sequences
    assert sequence.story == ["PrefixLookedUp", "Started", "FirstToken", "SequenceEnded"]
    assert sequence.args("SequenceEnded") == (None, 5)


async def test_a_prompt_whose_log_probabilities_are_wanted_is_not_looked_for(open_bench: Any, make_spec: Any) -> None:
    async with open_bench() as bench:
        spec = make_spec(13, 5)
        bench.reserve(1, replace(spec, sampling=replace(spec.sampling, prompt_logprobs=1)), local_prefill=True)
        await bench.settled()
    assert bench.recorded.sequences[0].story == ["Started", "FirstToken", "SequenceEnded"]


async def test_a_resumed_sequence_counts_only_what_was_sampled_here(open_bench: Any, make_spec: Any) -> None:
    async with open_bench() as bench:
        spec = make_spec(9, 7, emitted=3)
        by_handoff = bench.reserve(1, spec)
        bench.reserve(2, spec, local_prefill=True)
        bench.hand_off(await bench.ticket(by_handoff), spec)
        await bench.settled()
    assert [sequence.args("SequenceEnded") for sequence in bench.recorded.sequences] == [(None, 3), (None, 4)]


async def test_steps_tell_prompt_tokens_from_decoding_sequences(open_bench: Any, make_spec: Any) -> None:
    async with open_bench(chunk_tokens=4) as bench:
        local, landed = make_spec(5, 2), make_spec(5, 3, salt=1)
        bench.engine.hold()
        bench.reserve(1, local, local_prefill=True)
        handle = bench.reserve(2, landed)
        bench.hand_off(await bench.ticket(handle), landed)
        bench.engine.let_go()
        await bench.settled()
    steps = bench.recorded.steps
    assert sum(step.num_prefill_tokens for step in steps) == 5
    assert sum(step.num_decode_seqs for step in steps) == 1 + 2  # all but each one's first token
    assert max(step.num_seqs for step in steps) == 2


async def test_the_time_of_a_step_is_the_engines(open_bench: Any, make_spec: Any) -> None:
    async with open_bench() as bench:
        bench.engine.step_s = 0.25
        bench.reserve(1, make_spec(5, 2), local_prefill=True)
        await bench.settled()
    assert [step.seconds for step in bench.recorded.steps] == [0.25, 0.25]


async def test_preemptions_are_told_and_the_first_token_only_once(open_bench: Any, make_spec: Any) -> None:
    async with open_bench(num_blocks=10, block_size=2, max_seqs=4) as bench:
        for number in range(3):
            bench.reserve(number, make_spec(3, 10, salt=number), local_prefill=True)
        await bench.settled()
        num_preemptions = bench.worker.load().preemptions
    told = [name for sequence in bench.recorded.sequences for name in sequence.names]
    assert told.count("Preempted") == num_preemptions > 0
    assert told.count("FirstToken") == told.count("Started") == 3
    assert [sequence.args("SequenceEnded") for sequence in bench.recorded.sequences] == [(None, 10)] * 3


async def test_nothing_is_told_of_a_hand_off_after_the_end(open_bench: Any, make_spec: Any) -> None:
    async with open_bench() as bench:
        handle = bench.reserve(1, make_spec())
        ticket = await bench.ticket(handle)
        bench.receiver.show(ticket)
        bench.worker.release(bench.router, handle)
        bench.receiver.writer_stops(ticket)
        assert bench.recorded.sequences[0].story == [
            "BlocksReserved",
            "PrefixLookedUp",
            "TransferStarted",
            "SequenceEnded",
        ]
        assert bench.recorded.sequences[0].args("SequenceEnded") == (None, 0)


async def test_a_failed_hand_off_is_the_error_of_the_end(open_bench: Any, make_spec: Any) -> None:
    async with open_bench() as bench:
        ticket = await bench.ticket(bench.reserve(1, make_spec()))
        bench.receiver.fail(ticket)
        assert isinstance(bench.recorded.sequences[0].args("SequenceEnded")[0], TransferError)


async def test_a_broken_step_ends_its_sequences_with_the_error_and_is_not_told(open_bench: Any, make_spec: Any) -> None:
    async with open_bench() as bench:
        bench.engine.errors[0] = RuntimeError("broken")
        bench.reserve(1, make_spec(), local_prefill=True)
        await bench.settled()
    assert isinstance(bench.recorded.sequences[0].args("SequenceEnded")[0], InternalError)
    assert bench.recorded.steps == []
