"""Host memory that can still be taken: the machine's or, in a container, its cgroup's."""

from __future__ import annotations

from pathlib import Path


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """None if it is not told; `root` is where /proc and /sys are."""
    limits = (_meminfo_available(root / "proc/meminfo"), _cgroup_available(root / "sys/fs/cgroup"))
    return min((limit for limit in limits if limit is not None), default=None)


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
