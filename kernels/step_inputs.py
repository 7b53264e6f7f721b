"""The inputs of a captured decode step, put where its graph reads them.

A row's token stands at the last position of its seq, in the slot that the seq's table names for it; so positions and
slots are computed on the device, by one kernel where Triton's are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import triton
from kernels.spec import Dims


@dataclass(frozen=True, slots=True, eq=False)
class GraphRows:
    """Tensors of B rows whose places do not change."""

    token_ids: torch.Tensor
    """`[B]` int64, as `positions` and `slot_mapping`."""
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    """`[B]` int32."""
    block_tables: torch.Tensor
    """`[B, M]` int32."""

    @classmethod
    def empty(cls, num_rows: int, num_columns: int, device: torch.device) -> GraphRows:
        """Rows of no seq: length 0, no slot."""
        return cls(
            token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
            block_tables=torch.full((num_rows, num_columns), -1, dtype=torch.int32, device=device),
        )


def load_rows(
    rows: GraphRows,
    token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_rows: int,
    block_size: int,
) -> None:
    """Writes a step of b seqs into the first `num_rows` of `rows`; those beyond the b-th become rows of no seq.

    `token_ids` `[b]` int64, `seq_lens` `[b]` int32 with the step's own token, `block_tables` `[b, m]` int32, m ≤ M.
    """
    dims, device = Dims(), rows.token_ids.device
    dims.check("token_ids", token_ids, ("b",), torch.int64, device)
    dims.check("seq_lens", seq_lens, ("b",), torch.int32, device)
    dims.check("block_tables", block_tables, ("b", "m"), torch.int32, device)
    if triton.obstacle(device, torch.float32) is None:
        from kernels.triton.step_inputs import load_rows as load

        return load(rows, token_ids, seq_lens, block_tables, num_rows, block_size)
    used, positions = dims["b"], (seq_lens - 1).to(torch.int64)  # [b]
    blocks = block_tables.gather(1, positions[:, None] // block_size)[:, 0]  # [b]
    rows.token_ids[:used] = token_ids
    rows.positions[:used] = positions
    rows.slot_mapping[:used] = blocks * block_size + positions % block_size
    rows.seq_lens[:used] = seq_lens
    rows.block_tables[:used, : dims["m"]] = block_tables
    rows.seq_lens[used:num_rows] = 0  # tokens, positions and tables there are old, but valid and not looked at
    rows.slot_mapping[used:num_rows] = -1
    return None
