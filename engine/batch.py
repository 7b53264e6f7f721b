"""One step's tensors from its scheduled seqs: pure, and cheap, since it runs every step.

Numpy does the work; torch is entered once per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.step import SampleSpec, ScheduledSeq
from engine.upload import upload
from kernels.attention import AttentionMetadata
from tandem.errors import InternalError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """What the decoder and the sampler read in one step; B seqs, T tokens, R rows to sample."""

    token_ids: torch.Tensor
    """`[T]` int64, seq after seq."""
    positions: torch.Tensor
    """`[T]` int64: absolute position of each token in its seq."""
    metadata: AttentionMetadata
    sample_rows: torch.Tensor
    """`[R]` int64: the tokens, as indices into T, whose logits are wanted."""
    sample_specs: tuple[SampleSpec, ...]
    """R of them, in the order of `sample_rows`."""


def build_batch(seqs: Sequence[ScheduledSeq], block_size: int, device: torch.device) -> Batch:
    """Lays B > 0 seqs end to end. Raises InternalError if a seq's blocks do not hold its tokens."""
    token_ids = [token_id for seq in seqs for token_id in seq.token_ids]  # [T]
    query_lens = np.array([len(seq.token_ids) for seq in seqs], dtype=np.int64)  # [B]
    context_lens = np.array([seq.context_len for seq in seqs], dtype=np.int64)  # [B]
    seq_lens = context_lens + query_lens  # [B]
    cu_seqlens_q = np.zeros(len(seqs) + 1, dtype=np.int32)  # [B + 1]
    np.cumsum(query_lens, out=cu_seqlens_q[1:])
    block_tables = _pad_tables(seqs, seq_lens, block_size)  # [B, max_blocks]
    # Token t of seq b has position context_lens[b] + (t - cu_seqlens_q[b]).
    rows = np.repeat(np.arange(len(seqs)), query_lens)  # [T]
    positions = np.arange(len(token_ids)) + (context_lens - cu_seqlens_q[:-1])[rows]  # [T]
    slots = block_tables[rows, positions // block_size] * np.int64(block_size) + positions % block_size  # [T]
    sampled = [index for index, seq in enumerate(seqs) if seq.sample is not None]
    sample_rows = cu_seqlens_q[1:][sampled].astype(np.int64) - 1  # [R]
    longs = (np.array(token_ids, dtype=np.int64), positions, sample_rows, slots)
    ints = (cu_seqlens_q, seq_lens.astype(np.int32), block_tables)
    tokens, at, sampled_at, slot_mapping, starts, lens, tables = upload((*longs, *ints), device)
    metadata = AttentionMetadata(
        cu_seqlens_q=starts,
        seq_lens=lens,
        block_tables=tables,
        slot_mapping=slot_mapping,
        query_lens_host=tuple(query_lens.tolist()),
        seq_lens_host=tuple(seq_lens.tolist()),
    )
    return Batch(
        token_ids=tokens,
        positions=at,
        metadata=metadata,
        sample_rows=sampled_at,
        sample_specs=tuple(seq.sample for seq in seqs if seq.sample is not None),
    )


def _pad_tables(seqs: Sequence[ScheduledSeq], seq_lens: Ints, block_size: int) -> npt.NDArray[np.int32]:
    """Returns `[B, max_blocks]` int32, each seq's blocks and -1 behind them.

    Only blocks that this step reads or writes: a table may run ahead of its tokens.
    """
    num_blocks = (-(-seq_lens // block_size)).tolist()
    tables = np.full((len(seqs), max(num_blocks)), -1, dtype=np.int32)
    for row, seq, count in zip(tables, seqs, num_blocks, strict=True):
        if len(seq.block_table) < count:
            raise InternalError(f"{len(seq.block_table)} blocks for {count * block_size} token slots")
        row[:count] = np.asarray(seq.block_table, dtype=np.int32)[:count]
    return tables
