"""How much memory a KV cache may take, and how many blocks that makes.

Available memory is what the GPU has left, and what the machine or, in a container, the cgroup
has: a pool on a GPU takes both, since a mirror in host memory is as large (`engine.mirror`).

Workers that start together all see the same memory as available, as none has taken its part yet. So each takes a share
that leaves room for all that the machine is made for: a prefill and a decode worker on each of its GPUs.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.errors import ConfigError
from tandem.kv_layout import KvLayout

GIB = 1 << 30
_HOST = torch.device("cpu")
HOST_SHARE, CPU_CAP_BYTES = 0.25, 4 * GIB
"""A worker shares the machine with its peer and with others; on GPUs there are as many such pairs as GPUs."""
GPU_SHARE = 0.4
"""So that a prefill and a decode worker that look at the same time fit on one GPU, with activations."""


def available_memory_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that can still be taken on `device`; `root` is where /proc and /sys are."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = (_meminfo_available(root / "proc/meminfo"), _cgroup_available(root / "sys/fs/cgroup"))
    return min((limit for limit in limits if limit is not None), default=CPU_CAP_BYTES)


def blocks_that_fit(
    layout: KvLayout, memory_bytes: int | None, device: torch.device, max_tokens: int, root: Path = Path("/")
) -> int:
    """Blocks for a KV cache of `memory_bytes`; None = the default share. `root`: see `available_memory_bytes`.

    The default never takes more than `max_tokens` tokens need, so that a tiny model does not
    fill the machine. Raises ConfigError if not even one block fits.
    """
    if memory_bytes is not None:
        num_blocks = memory_bytes // layout.block_bytes
    else:
        share_bytes = available_memory_bytes(_HOST, root) * HOST_SHARE
        limit_bytes: float = CPU_CAP_BYTES
        if device.type == "cuda":
            share_bytes /= _num_gpus(root)
            limit_bytes = available_memory_bytes(device) * GPU_SHARE
        num_blocks = min(int(min(share_bytes, limit_bytes)) // layout.block_bytes, layout.blocks_for(max_tokens))
    if num_blocks < 1:
        raise ConfigError("--kv-memory", f"holds no KV block of {layout.block_bytes} bytes")
    return num_blocks


def check_memory(layout: KvLayout, num_blocks: int, device: torch.device) -> None:
    """Raises ConfigError if that many blocks cannot lie in what is available.

    Shared memory is handed out lazily: without this check the worker would be killed much
    later, when the pool fills.
    """
    wanted = num_blocks * layout.block_bytes
    for where in {device, _HOST}:
        available = available_memory_bytes(where)
        if wanted > available:
            raise ConfigError(
                "--kv-memory", f"{num_blocks} KV blocks take {wanted} bytes of {where}; {available} are available"
            )


def _num_gpus(root: Path) -> int:
    """GPUs of the machine: CUDA_VISIBLE_DEVICES hides those of other workers from CUDA, but not from /proc."""
    folder = root / "proc/driver/nvidia/gpus"
    return max(1, torch.cuda.device_count(), len(list(folder.iterdir())) if folder.exists() else 0)


def _meminfo_available(path: Path) -> int | None:
    lines = path.read_text().splitlines() if path.exists() else ()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_available(folder: Path) -> int | None:
    """What a cgroup (version 2) leaves; None without one or without a limit.

    The kernel counts cached files, such as the weights just read, but gives them back on demand. They are left
    out, as the kubelet does, or a worker with a large checkpoint would find no room for its pool.
    """
    try:
        limit = (folder / "memory.max").read_text().strip()
        current = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    used = current - int(stat.get("inactive_file", 0)) - int(stat.get("slab_reclaimable", 0))
    return None if limit == "max" else max(0, int(limit) - max(0, used))
