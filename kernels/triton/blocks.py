"""Whole blocks copied on the device: for copy-on-write, and to and from contiguous staging for transfer and swap.

A block is bytes, moved as 8-byte words. Ids lie on the device, so nothing waits for the host;
a negative id is skipped, which lets a captured graph carry padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.spec import check_block_pairs, check_blocks
from kernels.triton.variant import Variant
from tandem.errors import InternalError

_BLOCK = 1024
_NUM_WARPS = 4
_WORD_BYTES = 8


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies blocks within `pool` `[N, block_bytes]` uint8, in place, by `pairs` `[M, 2]` int64 (source, target).

    No target may be the source or target of another pair: pairs are copied in no order.
    """
    check_block_pairs(pool, pairs)
    words = _words("pool", pool)
    _copy(words, words, pairs[:, 0], pairs[:, 1])


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copies block `block_ids[i]` of `pool` `[N, block_bytes]` into row i of `staging` `[M, block_bytes]`.

    Both are uint8 with any stride over rows, `block_ids` `[M]` int64. Rows of negative ids stay as they are.
    """
    check_blocks(pool, staging, block_ids)
    _copy(_words("pool", pool), _words("staging", staging), block_ids, None)


def scatter_blocks(staging: torch.Tensor, block_ids: torch.Tensor, pool: torch.Tensor) -> None:
    """The reverse of `gather_blocks`: row i of `staging` becomes block `block_ids[i]`; ids must differ."""
    check_blocks(pool, staging, block_ids)
    _copy(_words("staging", staging), _words("pool", pool), None, block_ids)


def compile_variants(arch: int) -> Iterator[Variant]:
    """Pairs, gather and scatter; alike on every `arch`."""
    for label, source_by_id, target_by_id in (("copy", True, True), ("gather", True, False), ("scatter", False, True)):
        yield Variant(
            kernel=_copy_words,
            signature={
                **dict.fromkeys(("source", "target", "source_ids", "target_ids"), "*i64"),
                **dict.fromkeys(("source_stride", "target_stride", "id_stride", "width"), "i32"),
            },
            constexprs={"BLOCK": _BLOCK, "SOURCE_BY_ID": source_by_id, "TARGET_BY_ID": target_by_id},
            num_warps=_NUM_WARPS,
            num_stages=1,
            label=f"{label} blocks",
            aligned=frozenset(("source_stride", "target_stride", "width")),
        )


def _words(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows of bytes `[M, block_bytes]` seen as rows of words."""
    for what, size in (("block_bytes", rows.shape[1]), ("stride", rows.stride(0)), ("address", rows.data_ptr())):
        if size % _WORD_BYTES:
            raise InternalError(f"{name}: {what} {size} is not a multiple of {_WORD_BYTES}")
    return rows.view(torch.int64)


def _copy(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor | None, target_ids: torch.Tensor | None
) -> None:
    """Copies word rows; ids `[M]` choose the rows of their side, None takes them in order."""
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    width = source.shape[1]
    if not len(ids) or not width:
        return
    _copy_words[(len(ids), triton.cdiv(width, _BLOCK))](
        source,
        target,
        ids if source_ids is None else source_ids,
        ids if target_ids is None else target_ids,
        *(source.stride(0), target.stride(0), ids.stride(0), width),
        BLOCK=_BLOCK,
        SOURCE_BY_ID=source_ids is not None,
        TARGET_BY_ID=target_ids is not None,
        num_warps=_NUM_WARPS,
    )


@triton.jit
def _copy_words(
    source: tl.tensor,
    target: tl.tensor,
    source_ids: tl.tensor,
    target_ids: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    id_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    SOURCE_BY_ID: tl.constexpr,
    TARGET_BY_ID: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source_row, target_row = row, row
    if SOURCE_BY_ID:
        source_row = tl.load(source_ids + row * id_stride)
    if TARGET_BY_ID:
        target_row = tl.load(target_ids + row * id_stride)
    if (source_row >= 0) & (target_row >= 0):
        values = tl.load(source + source_row * source_stride + words, mask=words < width)
        tl.store(target + target_row * target_stride + words, values, mask=words < width)
