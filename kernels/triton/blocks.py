"""Whole blocks copied within a pool on the device, for copy-on-write.

A block is bytes, moved as 8-byte words. Ids lie on the device, so nothing waits for the host;
a negative id is skipped, which lets a captured graph carry padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.spec import check_block_pairs
from kernels.triton.variant import Variant, launch_options
from tandem.errors import InternalError

_BLOCK = 1024
_NUM_WARPS = 4
_WORD_BYTES = 8


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """See `Operations.copy_blocks`; `pool` may have any stride over blocks that is a multiple of 8 bytes."""
    check_block_pairs(pool, pairs)
    for what, size in (("block_bytes", pool.shape[1]), ("stride", pool.stride(0)), ("address", pool.data_ptr())):
        if size % _WORD_BYTES:
            raise InternalError(f"pool: {what} {size} is not a multiple of {_WORD_BYTES}")
    words = pool.view(torch.int64)
    width = words.shape[1]
    if len(pairs) and width:
        grid = (len(pairs), triton.cdiv(width, _BLOCK))
        strides = words.stride(0), pairs.stride(0)
        _copy_words[grid](words, pairs, *strides, width, BLOCK=_BLOCK, **launch_options(_NUM_WARPS))


def compile_variants(arch: int) -> Iterator[Variant]:
    """Alike on every `arch`."""
    yield Variant(
        kernel=_copy_words,
        signature=dict.fromkeys(("pool", "pairs"), "*i64"),
        constexprs={"BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        label="copy blocks",
        aligned=frozenset(("pool_stride", "width")),
    )


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def _copy_words(pool, pairs, pool_stride, pair_stride, width, BLOCK: tl.constexpr):
    pair = pairs + tl.program_id(0).to(tl.int64) * pair_stride
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(pair)
    target = tl.load(pair + 1)
    if (source >= 0) & (target >= 0):
        values = tl.load(pool + source * pool_stride + words, mask=words < width)
        tl.store(pool + target * pool_stride + words, values, mask=words < width)
