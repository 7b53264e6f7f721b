"""The digest of blocks in Triton against plain torch; interpreted on the CPU or compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.digest import reference_digests
from tandem.errors import InternalError
from tests.kernels.devices import needs_gpu, on_each_device

pytest.importorskip("triton")

from kernels.triton.digest import digest_blocks


@on_each_device
@pytest.mark.parametrize("block_bytes", [8, 32, 5 * 24 * 8, 8 * 4096, 8 * 4096 * 2 + 8])
def test_it_equals_the_plain_version(block_bytes: int, device: str) -> None:
    generator = torch.Generator().manual_seed(block_bytes)
    blocks = torch.randint(256, (9, block_bytes), dtype=torch.uint8, generator=generator).to(device)
    ids = torch.tensor([2, 8, 0, 2], device=device)
    assert torch.equal(digest_blocks(blocks, ids), reference_digests(blocks, ids))


@on_each_device
def test_blocks_may_be_strided_and_none_may_be_named(device: str) -> None:
    wide = torch.randint(256, (6, 96), dtype=torch.uint8).to(device)
    ids = torch.tensor([5, 1], device=device)
    assert torch.equal(digest_blocks(wide[:, 16:48], ids), reference_digests(wide[:, 16:48].contiguous(), ids))
    assert digest_blocks(wide, ids[:0]).shape == (0,)


def test_what_is_not_made_of_whole_words_is_refused_by_name() -> None:
    blocks, ids = torch.zeros(3, 32, dtype=torch.uint8), torch.tensor([0])
    for message, view in {
        "block_bytes 28": blocks[:, :28],
        "address": blocks[:, 4:12],
        "stride 12": torch.zeros(3, 12, dtype=torch.uint8)[:, :8],
    }.items():
        with pytest.raises(InternalError, match=f"^blocks: {message}"):
            digest_blocks(view, ids)


@needs_gpu
def test_a_digest_reaches_beyond_two_gigabytes() -> None:
    rows = 1 << 8
    blocks = torch.zeros(rows, 1 << 24, dtype=torch.uint8, device="cuda")
    blocks[-1] = 7
    ids = torch.tensor([0, rows - 1], device="cuda")
    assert torch.equal(digest_blocks(blocks, ids), reference_digests(blocks, ids))
