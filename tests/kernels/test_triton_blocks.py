"""Copies of whole blocks: the named ones arrive, all others stay; interpreted on the CPU or compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from tandem.errors import InternalError

pytest.importorskip("triton")

from kernels.triton.blocks import copy_blocks, gather_blocks, scatter_blocks

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the same tests")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
BLOCK_BYTES = [8, 32, 5 * 24 * 8, 8 * 1024, 8 * 1024 * 2 + 8]


def random_bytes(rows, block_bytes, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (rows, block_bytes), dtype=torch.uint8, generator=generator).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_copy_writes_the_targets_alone(block_bytes, device):
    pool = random_bytes(9, block_bytes, device)
    expected = pool.clone()
    expected[[7, 0, 3]] = pool[[2, 8, 2]]
    copy_blocks(pool, torch.tensor([[2, 7], [8, 0], [-1, 4], [2, 3], [4, -1]], device=device))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_gather_then_scatter_moves_blocks_through_staging(block_bytes, device):
    pool, other = random_bytes(9, block_bytes, device), random_bytes(7, block_bytes, device, seed=1)
    ids, other_ids = torch.tensor([5, 0, 8], device=device), torch.tensor([6, 1, 3], device=device)
    staging = torch.zeros(3, block_bytes, dtype=torch.uint8, device=device)
    gather_blocks(pool, ids, staging)
    assert torch.equal(staging, pool[ids])
    expected = other.clone()
    expected[other_ids] = pool[ids]
    scatter_blocks(staging, other_ids, other)
    assert torch.equal(other, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_negative_ids_leave_rows_and_blocks_as_they_are(device):
    pool, staging = random_bytes(4, 64, device), random_bytes(3, 64, device, seed=1)
    ids = torch.tensor([-1, 2, -1], device=device)
    gathered = staging.clone()
    gathered[1] = pool[2]
    gather_blocks(pool, ids, staging)
    assert torch.equal(staging, gathered)
    scattered = pool.clone()
    scatter_blocks(staging, torch.tensor([3, -1, -1], device=device), pool)
    scattered[3] = staging[0]
    assert torch.equal(pool, scattered)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_strided(device):
    wide, staging_wide = random_bytes(6, 96, device), random_bytes(2, 128, device, seed=1)
    pool, staging = wide[:, 16:48], staging_wide[:, 8:40]
    gather_blocks(pool, torch.tensor([5, 1], device=device), staging)
    assert torch.equal(staging, pool[[5, 1]])
    expected = staging_wide.clone()
    expected[:, 8:40] = pool[[5, 1]]
    assert torch.equal(staging_wide, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_named_is_nothing_done(device):
    pool = random_bytes(3, 32, device)
    before = pool.clone()
    copy_blocks(pool, torch.empty(0, 2, dtype=torch.int64, device=device))
    none = torch.empty(0, dtype=torch.int64, device=device)
    gather_blocks(pool, none, pool[:0])
    scatter_blocks(pool[:0], none, pool)
    assert torch.equal(pool, before)


def test_wrong_arguments_are_refused_by_name():
    pool, ids = torch.zeros(3, 32, dtype=torch.uint8), torch.tensor([0, 1])
    refusals = {
        "pool: dtype": lambda: gather_blocks(pool.int(), ids, pool[:2]),
        "staging: M is 3": lambda: gather_blocks(pool, ids, pool),
        "staging: block_bytes is 24": lambda: gather_blocks(pool, ids, pool[:2, :24]),
        "block_ids: dtype is torch.int32": lambda: scatter_blocks(pool[:2], ids.int(), pool),
        "pairs: pair is 3": lambda: copy_blocks(pool, torch.zeros(1, 3, dtype=torch.int64)),
        "pool: block_bytes 28 is not a multiple of 8": lambda: copy_blocks(pool[:, :28], ids[None]),
        "pool: address": lambda: copy_blocks(pool[:, 4:12], ids[None]),
        "pool: stride 12": lambda: copy_blocks(torch.zeros(3, 12, dtype=torch.uint8)[:, :8], ids[None]),
    }
    for message, call in refusals.items():
        with pytest.raises(InternalError, match=f"^{message}"):
            call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_copy_reaches_beyond_two_gigabytes():
    rows = 1 << 8
    pool = torch.zeros(rows, 1 << 24, dtype=torch.uint8, device="cuda")
    pool[0] = 7
    copy_blocks(pool, torch.tensor([[0, rows - 1]], device="cuda"))
    assert bool((pool[-1] == 7).all())
    assert not bool(pool[1:-1].any())
