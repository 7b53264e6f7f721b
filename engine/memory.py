"""How much memory a KV cache may take, and how many blocks that makes.

Available memory is what the GPU has left, and what the machine or, in a container, the cgroup has: a pool on a GPU
takes host memory too, for a ring of rows through which its blocks pass where transports reach nothing else.

Workers that start together all see the same memory as available, as none has taken its part yet. So each takes a share
that leaves room for the other workers, whose number is an option.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shell.config import WorkerConfig
from shell.host_memory import available_host_bytes
from tandem.decision import Decision, decision
from tandem.errors import ConfigError
from tandem.kv_layout import KvLayout

GIB = 1 << 30
MIN_RING_ROWS = 16
RING_SHARE, MIN_RING_BYTES, MAX_RING_BYTES = 1 / 16, GIB // 4, GIB
"""Share of the pool; a ring need not hold more than what is on its way at a time."""
_HOST = torch.device("cpu")
HOST_SHARE, CPU_CAP_BYTES = 0.5, 4 * GIB
"""By default all workers of the machine take half of the host memory, and a worker on a CPU never more than the cap."""
MANY_SEQS, FEW_SEQS = 256, 64
"""Sequences of a batch: on an H200 with an 8B model, 256 callers get 1.7 times the tokens per second that 64 get."""
LARGE_GPU_BYTES = 40_000_000_000
"""Memory of a GPU from which on such a model leaves room for `MANY_SEQS`."""
GPU_SHARE = 0.9
"""Share of a GPU that all its workers take, their steps included: CUDA graphs and transports need the rest."""


def seqs_of(asked: int, device: torch.device) -> int:
    """Returns the sequences of a batch: as many as were asked for, or for 0 by the memory of the device."""
    if asked:
        return asked
    is_large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES
    return MANY_SEQS if is_large else FEW_SEQS


def seqs_decision(asked: int, num_seqs: int) -> Decision:
    """Returns why a batch has `num_seqs` sequences, as `seqs_of` found them."""
    large = f"{LARGE_GPU_BYTES / 1e9:.0f} GB"
    why = f"a GPU of {large} and more" if num_seqs == MANY_SEQS else f"no GPU of {large} and more"
    return decision("sequences in a batch", num_seqs, "--max-seqs", asked, why)


def available_memory_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that can still be taken on `device`; `root` is where /proc and /sys are."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = available_host_bytes(root)
    return CPU_CAP_BYTES if available is None else available


def blocks_that_fit(
    config: WorkerConfig,
    layout: KvLayout,
    device: torch.device,
    max_tokens: int,
    root: Path = Path("/"),
    *,
    step_bytes: int = 0,
) -> int:
    """Returns the blocks of the pool: as large as the options ask for, else a share less `step_bytes` for steps.

    A share, asked for or by default, never takes more than `max_tokens` tokens need, so that a tiny model does not
    fill the machine. `root`: see `available_memory_bytes`. Raises ConfigError if not even one block fits.
    """
    if config.kv_blocks is not None:
        if config.kv_memory is not None:
            raise ConfigError("--kv-blocks", "and --kv-memory exclude each other")
        return config.kv_blocks
    if isinstance(config.kv_memory, int):
        num_blocks = config.kv_memory // layout.block_bytes
    else:
        if config.kv_memory is not None:
            share_bytes = config.kv_memory.of(available_memory_bytes(device, root)) - step_bytes
        elif device.type == "cuda":
            share_bytes = available_memory_bytes(device) * GPU_SHARE / config.device_workers - step_bytes
        else:
            share_bytes = min(_host_share_bytes(config.host_workers or 2, root), CPU_CAP_BYTES)
        num_blocks = min(int(max(share_bytes, 0)) // layout.block_bytes, layout.blocks_for(max_tokens))
    if num_blocks < 1:
        raise ConfigError(
            "--kv-memory", f"holds no KV block of {layout.block_bytes} bytes: give more, or a smaller --block-size"
        )
    return num_blocks


def pool_decision(
    config: WorkerConfig, layout: KvLayout, device: torch.device, num_blocks: int, max_tokens: int
) -> Decision:
    """Returns why the pool has `num_blocks`, as `blocks_that_fit` found them."""
    value = f"{num_blocks} blocks of {layout.block_size} tokens, {num_blocks * layout.block_bytes / GIB:.2f} GiB"
    if config.kv_blocks is not None:
        return decision("KV pool", value, "--kv-blocks", True, "")
    if num_blocks == layout.blocks_for(max_tokens):
        why = f"all sequences of a batch fit at their longest: {max_tokens} tokens"
    elif device.type == "cuda":
        why = f"{GPU_SHARE:.0%} of the GPU's free memory, shared by {config.device_workers}, less what steps take"
    else:
        num_workers, most_gib = config.host_workers or 2, CPU_CAP_BYTES // GIB
        why = f"{HOST_SHARE:.0%} of the machine's free memory, shared by {num_workers}, {most_gib} GiB at most"
    return decision("KV pool", value, "--kv-memory", config.kv_memory is not None, why)


def ring_rows_for(config: WorkerConfig, layout: KvLayout, num_blocks: int, root: Path = Path("/")) -> int:
    """Returns the rows of a block each in the host ring: by the options, else by the pool, within the default share.

    Raises ConfigError if it holds fewer than MIN_RING_ROWS.
    """
    ring_bytes = config.host_ring_bytes
    if ring_bytes is not None:
        if ring_bytes < MIN_RING_ROWS * layout.block_bytes:
            raise ConfigError(
                "--host-ring-memory", f"holds fewer than {MIN_RING_ROWS} KV blocks of {layout.block_bytes} bytes"
            )
        return ring_bytes // layout.block_bytes
    pool_bytes = num_blocks * layout.block_bytes
    wanted_bytes = min(max(pool_bytes * RING_SHARE, MIN_RING_BYTES), MAX_RING_BYTES, pool_bytes)
    share_bytes = _host_share_bytes(config.host_workers or 2 * _num_gpus(root), root)
    return max(MIN_RING_ROWS, int(min(wanted_bytes, share_bytes)) // layout.block_bytes)


def check_memory(
    layout: KvLayout, num_blocks: int, device: torch.device, ring_rows: int = 0, step_bytes: int = 0
) -> None:
    """Raises ConfigError if that many blocks, and rows of a ring, cannot lie in what is available beside `step_bytes`.

    Shared memory is handed out lazily: without this check the worker would be killed much
    later, when the pool fills.
    """
    for option, what, count, where, kept_bytes in (
        ("--kv-memory", "KV blocks", num_blocks, device, step_bytes),
        ("--host-ring-memory", "rows of the host ring", ring_rows, _HOST, 0),
    ):
        wanted, available = count * layout.block_bytes, available_memory_bytes(where) - kept_bytes
        if wanted > available:
            raise ConfigError(
                option, f"{count} {what} take {wanted} bytes of {where}; {available} are available: ask for less"
            )


def _host_share_bytes(host_workers: int, root: Path) -> float:
    """Returns what each of `host_workers` workers may take of host memory."""
    return available_memory_bytes(_HOST, root) * HOST_SHARE / host_workers


def _num_gpus(root: Path) -> int:
    """GPUs of the machine: CUDA_VISIBLE_DEVICES hides those of other workers from CUDA, but not from /proc."""
    folder = root / "proc/driver/nvidia/gpus"
    return max(1, torch.cuda.device_count(), len(list(folder.iterdir())) if folder.exists() else 0)
