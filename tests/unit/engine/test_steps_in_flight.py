"""Steps that are fed by the one before them give the tokens of steps taken one at a time.

`drive` keeps two steps in flight as a worker does: the next is prepared and launched before the result of the
one before is looked at. Seqs that turn out to have finished cost one discarded token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from bench.support.step_timer import two_in_flight
from engine.block_pool import BlockPool
from engine.device import Mark
from engine.kv_cache import KvCache
from engine.runner import Launched, Runner
from engine.sequence import Sequence
from engine.step import BrokenLogits, SampledToken, Step
from tandem.types import BlockId, TokenId
from tests.decode_rows import rows_of

BLOCK_SIZE = 4
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
MIX = [
    {},
    {"temperature": 8.0, "seed": 3},
    {"temperature": 9.0, "seed": 4, "top_k": 9, "logprobs": 2},
    {"logprobs": 3},
    {"temperature": 20.0, "seed": 1, **PENALTIES},
    {**PENALTIES, "min_tokens": 3},
    {"max_tokens": 2},
]


class Driver:
    """Runs seqs to their end; everything is prefilled in the first step."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self._runner = runner
        self._pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.num_discarded = 0

    def drive(self, seqs: list[Sequence], *, in_flight: int) -> list[list[SampledToken]]:
        completions: list[list[SampledToken]] = [[] for _ in seqs]
        flying: list[tuple[list[Sequence], Launched]] = []
        while any(not seq.is_finished for seq in seqs) or flying:
            previous = flying[-1] if flying else None
            running = [seq for seq in seqs if not seq.is_exhausted]
            if running and len(flying) < in_flight:
                flying.append((running, self._launch(running, previous)))
                if len(flying) < in_flight:
                    continue
            stepped, launched = flying.pop(0)
            still_flying = flying[0][0] if flying else []
            self._apply(seqs, completions, stepped, launched, still_flying)
        for seq in seqs:
            self._pool.release(seq.take_blocks())
        self._pool.assert_idle()
        return completions

    def _launch(self, running: list[Sequence], previous: tuple[list[Sequence], Launched] | None) -> Launched:
        for seq in running:
            seq.add_blocks(self._pool.allocate(seq.blocks_wanted(seq.num_remaining_tokens, BLOCK_SIZE)))
        if running[0].num_computed_tokens:
            is_fed = previous is not None
            feeds = [previous[0].index(seq) if is_fed and seq.num_pending_tokens else -1 for seq in running]
            step = Step((), rows=rows_of(running, feeds))
        else:
            step = Step(tuple(seq.schedule(seq.num_remaining_tokens) for seq in running))
        prepared = self._runner.prepare(step)
        return self._runner.launch(prepared, None if previous is None else previous[1])

    def _apply(self, seqs, completions, stepped, launched, still_flying) -> None:
        drawn = self._runner.collect(launched).drawn
        for number, seq in enumerate(stepped):
            sampled = drawn[number]
            assert not isinstance(sampled, BrokenLogits)
            if seq.is_finished:
                self.num_discarded += 1
                continue
            (token,) = sampled
            completions[seqs.index(seq)].append(token)
            if seq.append_token(token.token_id) and seq in still_flying:
                seq.roll_back(1, 1)


@pytest.fixture
def runner(decoder, kv_cache: KvCache) -> Runner:
    return Runner(decoder, kv_cache)


def make_all(make_seq, **sampling) -> list[Sequence]:
    prompts = [(3, 1, 4), (1,), (5, 9, 2, 6, 5), (3, 5, 8, 9), (7,), (0,), (2, 3, 8)]
    return [make_seq(prompt, **{"max_tokens": 9, **mix, **sampling}) for prompt, mix in zip(prompts, MIX, strict=True)]


@pytest.mark.parametrize("ends", [(), tuple(range(0, 97, 5))])
def test_two_steps_in_flight_give_the_tokens_of_one_at_a_time(make_seq, runner, kv_cache, ends) -> None:
    sampling = {"end_token_ids": frozenset(map(TokenId, ends))}
    one, two = Driver(runner, kv_cache.num_blocks), Driver(runner, kv_cache.num_blocks)
    expected = one.drive(make_all(make_seq, **sampling), in_flight=1)
    kv_cache.fill_poison()
    assert two.drive(make_all(make_seq, **sampling), in_flight=2) == expected
    assert one.num_discarded == 0
    assert (two.num_discarded > 0) == bool(ends)


def test_each_of_the_mix_draws_other_tokens(make_seq, runner, kv_cache) -> None:
    completions = Driver(runner, kv_cache.num_blocks).drive(
        [make_seq((0,), **{"max_tokens": 9, **mix}) for mix in MIX[:-1]], in_flight=2
    )
    ids = [tuple(token.token_id for token in completion) for completion in completions]
    assert len({*ids[:3], *ids[4:]}) == 5
    assert ids[3] == ids[0]


def test_a_seq_fed_by_broken_logits_harms_nobody(make_seq, runner) -> None:
    broken, good = make_seq((1, 2), logit_bias={TokenId(5): float("inf")}), make_seq((4, 5), **PENALTIES)
    broken.add_blocks((BlockId(0),))
    good.add_blocks((BlockId(1),))
    first = runner.launch(runner.prepare(Step((broken.schedule(2), good.schedule(2)))), None)
    second = runner.prepare(Step((), rows=rows_of((broken, good), [0, 1])))
    drawn = runner.collect(runner.launch(second, first)).drawn
    assert drawn[0] == BrokenLogits()
    assert drawn[1] == (SampledToken(TokenId(18), None),)


class LoggingDevice:
    """A device whose work goes on after its launch; says in which order it is asked for what."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.breaks = False
        self._num_marks = 0

    def uploading(self) -> LoggingDevice:
        return self

    def __enter__(self) -> None:
        self.log.append("uploads")

    def __exit__(self, *_: object) -> None:
        self.log.append("uploaded")

    @contextmanager
    def downloading(self) -> Iterator[None]:
        self.log.append(f"downloads after {self._num_marks}")
        yield
        self.log.append(f"{self._num_marks} marks downloads")

    def mark(self) -> LoggingMark:
        self._num_marks += 1
        return LoggingMark(self, self._num_marks)

    def wait_for(self, mark: LoggingMark) -> None:
        self.log.append(f"queue waits for {mark.number}")

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.log.append("to host")
        return tensor

    def synchronize(self) -> None:
        self.log.append("synchronized")


class LoggingMark(Mark):
    def __init__(self, device: LoggingDevice, number: int) -> None:
        super().__init__(None)
        self.number = number
        self._device = device

    def wait(self) -> None:
        self._device.log.append(f"host waits for {self.number}")
        if self._device.breaks:
            raise RuntimeError("the device broke")


@pytest.fixture
def device() -> LoggingDevice:
    return LoggingDevice()


@pytest.fixture
def device_runner(decoder, kv_cache, device) -> Runner:
    return Runner(decoder, kv_cache, device=device)


def test_a_launch_waits_for_nothing_even_where_a_penalty_must_see_what_is_fed(make_seq, device_runner, device) -> None:
    plain, penalised = make_seq((1, 2)), make_seq((1, 2), **PENALTIES)
    for seq in (plain, penalised):
        seq.add_blocks((BlockId(0),))
        first = device_runner.launch(device_runner.prepare(Step((seq.schedule(2),))), None)
        device_runner.launch(device_runner.prepare(Step((), rows=rows_of((seq,), [0]))), first)
    assert device.log == [
        line
        for uploaded in (1, 4, 7, 10)  # then `uploaded + 1` at its begin, `uploaded + 2` at its end
        for line in (
            *("uploads", "uploaded", f"queue waits for {uploaded}"),
            *(f"downloads after {uploaded + 1}", "to host", f"{uploaded + 2} marks downloads"),
        )
    ]


def test_a_step_that_fails_synchronizes_the_device_before_it_says_so(make_seq, device_runner, device) -> None:
    seq = make_seq((1, 2))
    seq.add_blocks((BlockId(0),))
    prepared = device_runner.prepare(Step((seq.schedule(2),)))
    launched = device_runner.launch(prepared, None)
    device.breaks = True
    with pytest.raises(RuntimeError, match="broke"):
        device_runner.collect(launched)
    assert device.log[-1] == "synchronized"
    device.log.clear()
    fed = device_runner.prepare(Step((), rows=rows_of((seq,), [0])))
    with pytest.raises(AssertionError, match="fed by one that failed"):
        device_runner.launch(fed, None)
    assert device.log[-1] == "synchronized"


def test_the_bench_of_idle_time_launches_a_step_before_it_waits_for_the_one_before(make_seq, device_runner, device):
    seq = make_seq((1, 2))
    seq.add_blocks((BlockId(0),))
    call = two_in_flight(device_runner, Step((seq.schedule(2)._replace(token_ids=(TokenId(2),), context_len=1),)))
    device.log.clear()
    call()
    call()
    waits = [line for line in device.log if line.startswith(("host", "queue"))]
    assert waits == ["queue waits for 4", "host waits for 3", "queue waits for 7", "host waits for 6"]
