"""Copies of whole blocks: the named ones arrive, all others stay; interpreted on the CPU or compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from tandem.errors import InternalError
from tests.kernels.devices import needs_gpu, on_each_device

pytest.importorskip("triton")

from kernels.triton.blocks import copy_blocks

BLOCK_BYTES = [8, 32, 5 * 24 * 8, 8 * 1024, 8 * 1024 * 2 + 8]


def random_bytes(rows, block_bytes, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (rows, block_bytes), dtype=torch.uint8, generator=generator).to(device)


@on_each_device
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_copy_writes_the_targets_alone(block_bytes, device):
    pool = random_bytes(9, block_bytes, device)
    expected = pool.clone()
    expected[[7, 0, 3]] = pool[[2, 8, 2]]
    copy_blocks(pool, torch.tensor([[2, 7], [8, 0], [-1, 4], [2, 3], [4, -1]], device=device))
    assert torch.equal(pool, expected)


@on_each_device
def test_blocks_may_be_strided(device):
    wide = random_bytes(6, 96, device)
    expected = wide.clone()
    expected[1, 16:48] = wide[5, 16:48]
    copy_blocks(wide[:, 16:48], torch.tensor([[5, 1]], device=device))
    assert torch.equal(wide, expected)


@on_each_device
def test_nothing_named_is_nothing_done(device):
    pool = random_bytes(3, 32, device)
    before = pool.clone()
    copy_blocks(pool, torch.empty(0, 2, dtype=torch.int64, device=device))
    assert torch.equal(pool, before)


def test_wrong_arguments_are_refused_by_name():
    pool, pair = torch.zeros(3, 32, dtype=torch.uint8), torch.tensor([[0, 1]])
    refusals = {
        "pool: dtype": lambda: copy_blocks(pool.int(), pair),
        "pairs: dtype is torch.int32": lambda: copy_blocks(pool, pair.int()),
        "pairs: pair is 3": lambda: copy_blocks(pool, torch.zeros(1, 3, dtype=torch.int64)),
        "pool: block_bytes 28 is not a multiple of 8": lambda: copy_blocks(pool[:, :28], pair),
        "pool: address": lambda: copy_blocks(pool[:, 4:12], pair),
        "pool: stride 12": lambda: copy_blocks(torch.zeros(3, 12, dtype=torch.uint8)[:, :8], pair),
    }
    for message, call in refusals.items():
        with pytest.raises(InternalError, match=f"^{message}"):
            call()


@needs_gpu
def test_a_copy_reaches_beyond_two_gigabytes():
    rows = 1 << 8
    pool = torch.zeros(rows, 1 << 24, dtype=torch.uint8, device="cuda")
    pool[0] = 7
    copy_blocks(pool, torch.tensor([[0, rows - 1]], device="cuda"))
    assert bool((pool[-1] == 7).all())
    assert not bool(pool[1:-1].any())
