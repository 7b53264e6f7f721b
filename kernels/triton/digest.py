"""A 64-bit digest of each block, as `kernels.digest` describes it: a program mixes and adds the words of one tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.digest import GOLDEN, MIX_1, MIX_2, WORD_BYTES, check
from kernels.triton.variant import Variant, launch_options
from tandem.errors import InternalError

_TILE = 4096
_NUM_WARPS = 4
_GOLDEN: tl.constexpr = tl.constexpr(GOLDEN)
_MIX_1: tl.constexpr = tl.constexpr(MIX_1)
_MIX_2: tl.constexpr = tl.constexpr(MIX_2)


def digest_blocks(blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """See `kernels.digest.digest_blocks`; block size, stride and address are multiples of 8 bytes."""
    check(blocks, block_ids)
    for what, size in (("block_bytes", blocks.shape[1]), ("stride", blocks.stride(0)), ("address", blocks.data_ptr())):
        if size % WORD_BYTES:
            raise InternalError(f"blocks: {what} {size} is not a multiple of {WORD_BYTES}")
    words = blocks.view(torch.int64)
    width = words.shape[1]
    partial = torch.empty(len(block_ids), triton.cdiv(width, _TILE), dtype=torch.int64, device=blocks.device)
    if partial.numel():
        _digest_tiles[partial.shape](
            words, block_ids, partial, words.stride(0), width, TILE=_TILE, **launch_options(_NUM_WARPS)
        )
    return partial.sum(1)  # integers wrap, so that the order does not matter


def compile_variants(arch: int) -> Iterator[Variant]:
    """Alike on every `arch`."""
    yield Variant(
        kernel=_digest_tiles,
        signature=dict.fromkeys(("words", "block_ids", "partial"), "*i64"),
        constexprs={"TILE": _TILE},
        num_warps=_NUM_WARPS,
        label="digest blocks",
        aligned=frozenset(("stride", "width")),
    )


@triton.jit(do_not_specialize_on_alignment=["block_ids"])
def _digest_tiles(words, block_ids, partial, stride, width, TILE: tl.constexpr):
    block, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = words + tl.load(block_ids + block) * stride
    places = tile * TILE + tl.arange(0, TILE)
    inside = places < width
    z = tl.load(row + places, mask=inside, other=0).to(tl.uint64, bitcast=True)
    z += (places + 1).to(tl.uint64) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z ^= z >> 31
    total = tl.sum(tl.where(inside, z, 0).to(tl.int64, bitcast=True), 0)
    tl.store(partial + block * tl.num_programs(1) + tile, total)
