"""The inputs of a captured decode step, put where its graph reads them by one launch: a program per row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.step_inputs import GraphRows
from kernels.triton.variant import Variant, launch_options

_COLUMNS = 128
_NUM_WARPS = 1


def load_rows(
    rows: GraphRows,
    token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_rows: int,
    block_size: int,
) -> None:
    """See `kernels.step_inputs.load_rows`, which checks the arguments."""
    _load_rows[(num_rows,)](
        *(token_ids, seq_lens, block_tables),
        *(rows.token_ids, rows.positions, rows.slot_mapping, rows.seq_lens, rows.block_tables),
        *(*block_tables.shape, block_tables.stride(0), rows.block_tables.stride(0)),
        BLOCK_SIZE=block_size,
        COLUMNS=_COLUMNS,
        **launch_options(_NUM_WARPS),
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """Alike on every `arch`."""
    yield Variant(
        kernel=_load_rows,
        signature={
            **dict.fromkeys(("token_ids", "rows_token_ids", "rows_positions", "rows_slots"), "*i64"),
            **dict.fromkeys(("seq_lens", "block_tables", "rows_seq_lens", "rows_tables"), "*i32"),
        },
        constexprs={"BLOCK_SIZE": 16, "COLUMNS": _COLUMNS},
        num_warps=_NUM_WARPS,
        label="load rows",
    )


@triton.jit(
    do_not_specialize=["num_seqs", "width", "stride", "rows_stride"],
    do_not_specialize_on_alignment=["token_ids", "seq_lens", "block_tables"],
)
def _load_rows(
    token_ids, seq_lens, block_tables, rows_token_ids, rows_positions, rows_slots, rows_seq_lens, rows_tables,
    num_seqs, width, stride, rows_stride,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    used = row < num_seqs
    seq_len = tl.load(seq_lens + row, mask=used, other=0)
    position = tl.maximum(seq_len - 1, 0)
    block = tl.load(block_tables + row * stride + position // BLOCK_SIZE, mask=seq_len > 0, other=-1).to(tl.int64)
    tl.store(rows_seq_lens + row, seq_len)
    tl.store(rows_slots + row, tl.where(block < 0, -1, block * BLOCK_SIZE + position % BLOCK_SIZE))
    tl.store(rows_positions + row, position.to(tl.int64))
    tl.store(rows_token_ids + row, tl.load(token_ids + row, mask=used, other=0))
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = (columns < width) & used
        tl.store(
            rows_tables + row * rows_stride + columns,
            tl.load(block_tables + row * stride + columns, mask=inside, other=-1),
            mask=inside,
        )
