"""Steps on their way from rank 0 to followers: the arrays of a batch, in slots that are not written too early."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import rank_link
from engine.batch import build_batch
from engine.draws import SampleSpec
from engine.rank_link import NUM_SLOTS, STEPS_PER_TIMEOUT, RankStep, StepSender, StepSlots, in_step
from engine.runner import independent_runs
from engine.step import BlockCopy, DecodeRows, ScheduledSeq, ScoredTokens
from engine.step_layout import lay_out
from kernels.group import GroupBroken
from tandem.errors import InternalError
from tandem.types import BlockId, SamplingParams, TokenId

CPU, BLOCK_SIZE = torch.device("cpu"), 4
SAMPLE = SampleSpec(SamplingParams(max_tokens=1), 0)


@dataclass
class FakeGroup:
    rank: int = 0
    timeout_s: float = 0.05
    aborted: list[bool] = field(default_factory=list)

    def abort(self) -> None:
        self.aborted.append(True)


@pytest.fixture(scope="module")
def slots() -> Iterator[StepSlots]:
    descriptor = StepSlots.create()
    yield StepSlots(descriptor)
    os.close(descriptor)


def seq_of(query_len: int, context_len: int, first_block: int, num_samples: int) -> ScheduledSeq:
    num_blocks = -(-(query_len + context_len) // BLOCK_SIZE)
    tokens = tuple(map(TokenId, range(context_len, context_len + query_len)))
    blocks = tuple(map(BlockId, range(first_block, first_block + num_blocks)))[::-1]
    return ScheduledSeq(tokens, context_len, blocks, (SAMPLE,) * num_samples)


@st.composite
def steps(draw: Any) -> tuple[list[ScheduledSeq], DecodeRows | None, list[BlockCopy]]:
    contexts = draw(st.lists(st.integers(0, 20), max_size=4))
    decodes = [seq_of(1, length, 10 * number, 1) for number, length in enumerate(contexts)]
    feeds = draw(st.lists(st.integers(-1, 3), min_size=len(decodes), max_size=len(decodes)))
    sizes = st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(0, 3), st.booleans())
    chunks = []
    for number, (query_len, context_len, num_samples, scores) in enumerate(
        draw(st.lists(sizes, min_size=not decodes, max_size=4))
    ):
        seq = seq_of(query_len, context_len, 100 + 10 * number, num_samples)
        chunks.append(seq._replace(scored=ScoredTokens(seq.token_ids, 0, 2)) if scores else seq)
    pairs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(6, 9)), max_size=4))
    copies = [BlockCopy(BlockId(source), BlockId(target)) for source, target in pairs]
    return chunks, DecodeRows.of(decodes, feeds) if decodes else None, copies


@settings(deadline=None)
@given(step=steps(), slot=st.integers(0, NUM_SLOTS - 1))
def test_what_a_follower_reads_is_the_batch(slots: StepSlots, step: Any, slot: int) -> None:
    chunks, rows, copies = step
    layout, batch = lay_out(chunks, BLOCK_SIZE, rows), build_batch(chunks, BLOCK_SIZE, CPU, rows)
    read = slots.read(slots.write(slot, RankStep.of(layout, independent_runs(copies))))
    expected = {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "slots": batch.metadata.slot_mapping,
        "starts": batch.metadata.cu_seqlens_q,
        "seq_lens": batch.metadata.seq_lens,
        "tables": batch.metadata.block_tables,
        "rows": batch.sample_rows if batch.scores is None else batch.scores.hidden_rows,
        "fed": torch.zeros(0, dtype=torch.int64) if batch.feeds is None else batch.feeds.tokens,
    }
    if batch.scores is not None:
        expected |= {"scored": batch.scores.best.rows, "sampled": batch.scores.sample_rows}
    for name, tensor in expected.items():
        found = getattr(read, name)
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name
    assert (len(read.scored) > 0) == (batch.scores is not None)
    assert tuple(read.starts.diff().tolist()) == batch.metadata.query_lens_host
    assert [tuple(pair) for pair in read.copies.tolist()] == [(each.source, each.target) for each in copies]
    assert int(read.runs.sum()) == len(copies)


def step_of(token_id: int) -> RankStep[Any]:
    seq = seq_of(1, 0, 3, 1)._replace(token_ids=(TokenId(token_id),))
    return RankStep.of(lay_out([seq], BLOCK_SIZE), [])


def test_a_slot_is_written_again_only_when_all_followers_have_read_it(slots: StepSlots) -> None:
    (one, far_one), (two, far_two) = Pipe(), Pipe()
    group: Any = FakeGroup()
    sender = StepSender(slots, [one, two], group)
    for number in range(NUM_SLOTS):
        sender.send(step_of(number))
    far_one.send_bytes(b"")
    with pytest.raises(GroupBroken, match=r"rank 2 did not take a step within 0\.05 s"):
        sender.send(step_of(NUM_SLOTS))
    headers = [far_two.recv() for _ in range(NUM_SLOTS)]
    assert [int(slots.read(header).token_ids) for header in headers] == list(range(NUM_SLOTS))
    far_two.send_bytes(b"")
    sender.send(step_of(NUM_SLOTS))
    assert int(slots.read(far_two.recv()).token_ids) == NUM_SLOTS


def test_a_step_larger_than_a_slot_is_refused(slots: StepSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_link, "SLOT_BYTES", 64)
    with pytest.raises(InternalError, match="of which a slot holds 64"):
        slots.write(0, step_of(1))


def test_whatever_fails_in_a_step_breaks_the_group_and_a_step_that_ends_may_only_prolong_waits() -> None:
    group: Any = FakeGroup()
    with pytest.raises(GroupBroken, match="rank 0 failed in a step: ValueError"), in_step(group):
        raise ValueError("no")
    assert group.aborted == [True]
    group.timeout_s = 1e-9
    with in_step(group):
        np.zeros(1000).sum()
    assert group.timeout_s > STEPS_PER_TIMEOUT * 1e-9
    group.timeout_s = 1000.0
    with in_step(group):
        pass
    assert group.timeout_s == 1000.0
