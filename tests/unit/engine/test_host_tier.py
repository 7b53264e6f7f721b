"""Blocks that move to the host tier and back into other blocks."""

from __future__ import annotations

import pytest

from engine.host_tier import HostTier
from engine.runner import Runner
from engine.step import BlockCopy, Direction, ScheduledSeq, Step, TierMove
from tandem.errors import InternalError
from tandem.types import BlockId, TokenId

BLOCK_SIZE = 4
ROWS = tuple(range(8))


@pytest.fixture
def tier(kv_cache):
    tier = HostTier(len(ROWS), kv_cache.layout.block_bytes)
    yield tier
    tier.close()
    tier.close()


def test_a_block_may_leave_and_another_take_its_place_in_one_step(decoder, kv_cache, tier):
    runner, rows = Runner(decoder, kv_cache, tier=tier), ROWS[:2]
    kv_cache.blocks_view[:2] = 0
    kv_cache.blocks_view[1] = 7
    seqs = (ScheduledSeq((TokenId(1),), 0, (BlockId(5),)),)
    runner.run(Step(seqs, moves=(TierMove(BlockId(1), rows[0], Direction.OUT),)))
    swap = (TierMove(BlockId(0), rows[0], Direction.IN), TierMove(BlockId(0), rows[1], Direction.OUT))
    runner.run(Step(seqs, moves=swap, copies=(BlockCopy(BlockId(1), BlockId(2)),)))
    runner.run(Step(seqs, moves=(TierMove(BlockId(3), rows[1], Direction.IN),)))
    assert kv_cache.blocks_view[:4, 0].tolist() == [7, 7, 7, 0]


def test_moves_into_one_block_twice_or_into_what_is_copied_are_refused(decoder, kv_cache, tier):
    runner, rows = Runner(decoder, kv_cache, tier=tier), ROWS[:2]
    seqs = (ScheduledSeq((TokenId(1),), 0, (BlockId(5),)),)
    moves = tuple(TierMove(BlockId(0), row, Direction.IN) for row in rows)
    with pytest.raises(InternalError, match="two rows into one block"):
        runner.prepare(Step(seqs, moves=moves))
    with pytest.raises(InternalError, match="copies a block that it moves into"):
        runner.prepare(Step(seqs, moves=moves[:1], copies=(BlockCopy(BlockId(0), BlockId(1)),)))
