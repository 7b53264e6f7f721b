"""A decode step's inputs in their places: what is computed there is what the host would have said."""

from __future__ import annotations

import random

import pytest
import torch

from engine.batch import build_batch
from engine.step import ScheduledSeq
from kernels.step_inputs import GraphRows, load_rows
from tandem.errors import InternalError
from tandem.types import BlockId, TokenId
from tests.kernels.devices import on_each_device

pytest.importorskip("triton")

from kernels.triton import step_inputs as by_triton

BLOCK_SIZE, ROWS, WIDTH = 4, 6, 300


def rows_of(device) -> GraphRows:
    """As an earlier step left them."""
    longs = (torch.full((ROWS,), 77, dtype=torch.int64, device=device) for _ in range(3))
    lens = torch.full((ROWS,), 9, dtype=torch.int32, device=device)
    return GraphRows(*longs, lens, torch.full((ROWS, WIDTH), 5, dtype=torch.int32, device=device))


@pytest.mark.parametrize("load", [load_rows, by_triton.load_rows])
@on_each_device
@pytest.mark.parametrize("seq_lens", [(1,), (4, 5, 8, 9), (1000, 1, 3, 17, 1200, 2)])
def test_positions_and_slots_are_those_of_the_batch(seq_lens, device, load):
    rng = random.Random(0)
    seqs = [
        ScheduledSeq((TokenId(rng.randrange(90)),), length - 1, [BlockId(rng.randrange(999)) for _ in range(300)])
        for length in seq_lens
    ]
    batch, rows = build_batch(seqs, BLOCK_SIZE, torch.device(device)), rows_of(device)
    used, metadata = len(seqs), batch.metadata
    load(rows, batch.token_ids, metadata.seq_lens, metadata.block_tables, ROWS, BLOCK_SIZE)
    assert torch.equal(rows.token_ids[:used], batch.token_ids)
    assert torch.equal(rows.positions[:used], batch.positions)
    assert torch.equal(rows.slot_mapping[:used], metadata.slot_mapping)
    assert torch.equal(rows.seq_lens[:used], metadata.seq_lens)
    assert torch.equal(rows.block_tables[:used, : metadata.block_tables.shape[1]], metadata.block_tables)
    assert rows.seq_lens[used:].tolist() == [0] * (ROWS - used)
    assert rows.slot_mapping[used:].tolist() == [-1] * (ROWS - used)


def test_a_wrong_argument_is_named():
    rows = rows_of("cpu")
    lens, tables = torch.ones(2, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(InternalError, match="block_tables: b is 3"):
        load_rows(rows, torch.zeros(2, dtype=torch.int64), lens, tables, ROWS, BLOCK_SIZE)
