"""A rank but the first: it holds a shard of a model and a part of the pool, and computes the steps that rank 0 sends.

It knows no seq, draws nothing, and frees nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from engine.batch import Forward
from engine.kv_cache import KvCache
from engine.loading import load_here, probe_dtype
from engine.prompt_scores import score_tiles
from engine.rank_link import RankStep, StepSlots, in_step
from engine.ranks import JOIN_TIMEOUT_S, RankTask
from kernels.attention import AttentionMetadata
from kernels.compiled_step import StepInputs
from kernels.dispatch import select_kernels
from kernels.group import Group
from kernels.operations import Operations
from kernels.shared_group import SharedGroup
from shell.telemetry.logging import configure_logging


def follow(link: Connection[Any, Any], slots: StepSlots, memory: int) -> None:
    """Loads, and computes until the other end of the link is closed; `memory`: descriptor of the group's.

    Raises GroupBroken, and what loading raises.
    """
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(link, slots, memory)


def _serve(link: Connection[Any, Any], slots: StepSlots, memory: int) -> None:
    task: RankTask = link.recv()
    config = task.config
    configure_logging(f"rank-{task.rank}", config.log_format, config.log_level)
    os.sched_setaffinity(0, task.share.cores)
    torch.set_num_threads(task.share.threads)
    link.send_bytes(b"")
    group = SharedGroup(memory, task.rank, config.num_ranks, JOIN_TIMEOUT_S, task.timeout_s)
    os.close(memory)
    device = torch.device("cpu")
    kernels = select_kernels(config.attention_backend, device, probe_dtype(config), config.cpu_tier)
    model = load_here(config, device, kernels, group)
    link.send_bytes(model.fingerprint.encode())
    kv_cache = KvCache.mapped(link.recv(), recv_handle(link))
    link.send_bytes(b"")
    follower = Follower(model.decoder, kv_cache, kernels.operations, group)
    while True:
        step = slots.read(link.recv())
        link.send_bytes(b"")  # the slot is free
        with in_step(group), torch.inference_mode():
            follower.compute(step)


class Follower:
    """Computes what rank 0 computes between its block copies and its logits, in the same order."""

    def __init__(self, decoder: Forward, kv_cache: KvCache, operations: Operations, group: Group) -> None:
        """All are lent."""
        self._decoder = decoder
        self._kv = kv_cache.tensor  # [N, L, 2, Hkv, S, D]
        self._blocks = kv_cache.blocks_view  # [N, block_bytes]
        self._operations = operations
        self._group = group

    def compute(self, step: RankStep[torch.Tensor]) -> None:
        """Writes the step's KV into the pool; raises what the decoder raises, GroupBroken too."""
        if len(step.fed):
            step.token_ids.index_copy_(0, step.fed, self._group.broadcast(torch.empty_like(step.fed)))
        for start, end in pairwise(accumulate(step.runs.tolist(), initial=0)):
            self._operations.copy_blocks(self._blocks, step.copies[start:end])
        metadata = AttentionMetadata(
            cu_seqlens_q=step.starts,
            seq_lens=step.seq_lens,
            block_tables=step.tables,
            slot_mapping=step.slots,
            query_lens_host=tuple(step.starts.diff().tolist()),
            seq_lens_host=tuple(step.seq_lens.tolist()),
        )
        inputs = StepInputs(step.token_ids, step.positions, self._kv, metadata, step.rows)
        if not len(step.scored):
            self._decoder.forward(inputs)
            return
        hidden = self._decoder.hidden(inputs)  # [U, E]
        for tile in score_tiles(len(step.scored)):
            self._decoder.project(hidden.index_select(0, step.scored[tile]))
        self._decoder.project(hidden.index_select(0, step.sampled))
