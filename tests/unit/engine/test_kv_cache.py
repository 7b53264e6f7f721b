"""Memory of the pool: shape, sharing, poison, closing; and how much of it to take."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import kv_cache
from engine.kv_cache import HostMemory, KvCache
from engine.memory import (
    GIB,
    MIN_RING_ROWS,
    available_memory_bytes,
    blocks_that_fit,
    check_memory,
    ring_rows_for,
    seqs_of,
)
from kernels.quantized_kv import kv_scales
from shell.config import WorkerConfig
from tandem.errors import ConfigError
from tandem.kv_layout import DType, KvLayout, QuantDType
from tandem.option_values import Share

CPU = torch.device("cpu")
LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, block_size=4, head_dim=8, dtype=DType.BFLOAT16)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("shared", [False, True])
def test_a_block_is_one_contiguous_span_of_bytes(dtype: DType, shared: bool) -> None:
    layout = KvLayout(2, 3, 4, 8, dtype)
    cache = KvCache.create(layout, 5, CPU, shared=shared)
    assert cache.tensor.shape == (5, 2, 2, 3, 4, 8)
    assert cache.tensor.permute(0, 3, 1, 2, 4, 5).is_contiguous(), "head-major"
    assert cache.blocks_view.shape == (5, layout.block_bytes)
    cache.tensor.zero_()
    cache.tensor[3] = 1.0
    assert [bool(row.any()) for row in cache.blocks_view] == [False, False, False, True, False]
    assert cache.num_blocks == 5
    cache.close()


@pytest.mark.parametrize("dtype", list(QuantDType))
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_elements_and_scales_fill_a_block_between_them(dtype: QuantDType, num_kv_heads: int) -> None:
    layout = KvLayout(2, num_kv_heads, 4, 8, dtype)
    cache = KvCache.create(layout, 5, CPU)
    assert cache.tensor.shape == (5, *layout.block_shape)
    assert layout.block_bytes == 2 * 2 * num_kv_heads * 4 * (8 + 4)
    cache.blocks_view.zero_()
    cache.tensor[3].view(torch.int8).fill_(1)
    for layer in cache.tensor.unbind(1):
        kv_scales(layer)[3].view(torch.int8).fill_(2)
    rows = cache.blocks_view.view(5, -1, 4 * (8 + 4))  # [N, heads of a block, bytes]
    assert (rows[3, :, :32] == 1).all()
    assert (rows[3, :, 32:] == 2).all()
    assert not rows[[0, 1, 2, 4]].any()
    cache.fill_poison()
    assert all(kv_scales(layer).isnan().all() for layer in cache.tensor.unbind(1))
    cache.close()


@linux_only
def test_a_peer_with_the_descriptor_writes_into_the_same_bytes() -> None:
    cache = KvCache.create(LAYOUT, 4, CPU, shared=True)
    assert cache.shared_fd is not None
    with mmap.mmap(cache.shared_fd, 4 * LAYOUT.block_bytes) as peer:
        cache.blocks_view.zero_()
        peer[LAYOUT.block_bytes] = 77
        assert int(cache.blocks_view[1, 0]) == 77
        cache.blocks_view[2, 5] = 9
        assert peer[2 * LAYOUT.block_bytes + 5] == 9
    cache.close()


@linux_only
def test_one_process_maps_the_parts_of_all_ranks() -> None:
    part = LAYOUT.part(LAYOUT.num_kv_heads)
    theirs = KvCache.create(part, 4, CPU, shared=True)
    assert theirs.shared_fd is not None
    ours = KvCache.mapped(part, os.dup(theirs.shared_fd))
    theirs.blocks_view.fill_(3)
    ours.blocks_view[2, 1] = 4
    assert theirs.blocks_view[2, :3].tolist() == [3, 4, 3]
    assert ours.tensor.shape == theirs.tensor.shape
    theirs.close()
    assert int(ours.blocks_view[2, 1]) == 4, "the mapping outlives the rank that allocated it"
    ours.close()


@linux_only
def test_shared_memory_can_neither_grow_nor_shrink() -> None:
    cache = KvCache.create(LAYOUT, 4, CPU, shared=True)
    fd = cache.shared_fd
    assert fd is not None
    for size in (0, 8 * LAYOUT.block_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    cache.close()


@linux_only
def test_closing_gives_the_descriptor_and_the_mapping_back() -> None:
    cache = KvCache.create(LAYOUT, 4, CPU, shared=True)
    fd = cache.shared_fd
    assert fd is not None
    of_this_cache = f" {os.fstat(fd).st_ino} "
    assert of_this_cache in Path("/proc/self/maps").read_text()
    cache.close()
    cache.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert of_this_cache not in Path("/proc/self/maps").read_text()
    with pytest.raises(ValueError, match="closed"):
        _ = cache.tensor


@linux_only
def test_a_view_that_outlives_closing_can_still_be_read() -> None:
    cache = KvCache.create(LAYOUT, 4, CPU, shared=True)
    view = cache.blocks_view
    view.fill_(7)
    cache.close()
    assert int(view[3, 0]) == 7


def test_memory_that_is_not_there_is_a_matter_of_configuration() -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        KvCache.create(LAYOUT, 1 << 50, CPU)
    with pytest.raises(ConfigError, match="--kv-memory"):
        check_memory(LAYOUT, 1 << 50, CPU)
    check_memory(LAYOUT, 1, CPU)


def test_a_size_in_bytes_is_kept_to_and_the_default_is_what_contexts_need_within_a_modest_share() -> None:
    assert blocks_that_fit(WorkerConfig(kv_memory=10 * LAYOUT.block_bytes + 1), LAYOUT, CPU, max_tokens=1) == 10
    with pytest.raises(ConfigError, match="--kv-memory"):
        blocks_that_fit(WorkerConfig(kv_memory=LAYOUT.block_bytes - 1), LAYOUT, CPU, max_tokens=1)

    assert blocks_that_fit(WorkerConfig(), LAYOUT, CPU, max_tokens=30) == 8
    layout = KvLayout(80, 64, 16, 128, DType.FLOAT32)
    num_blocks = blocks_that_fit(WorkerConfig(), layout, CPU, max_tokens=10**9)
    assert num_blocks * layout.block_bytes <= min(4 * GIB, available_memory_bytes(CPU))


def test_a_share_is_of_what_is_free_less_what_steps_need_and_no_more_than_contexts_need(tmp_path: Path) -> None:
    root = make_root(tmp_path, None)  # 5,120,000 bytes

    def blocks(share: float, max_tokens: int = 10**9, step_bytes: int = 0) -> int:
        config = WorkerConfig(kv_memory=Share(share))
        return blocks_that_fit(config, LAYOUT, CPU, max_tokens, root, step_bytes=step_bytes)

    assert blocks(50.0) == 2_560_000 // LAYOUT.block_bytes
    assert blocks(50.0, step_bytes=560_000) == 2_000_000 // LAYOUT.block_bytes
    assert blocks(50.0, max_tokens=30) == LAYOUT.blocks_for(30)
    with pytest.raises(ConfigError, match="--kv-memory"):
        blocks(1.0, step_bytes=51_200)


@pytest.mark.parametrize(
    ("device", "total_bytes", "expected"),
    [("cpu", 0, 64), ("cuda", 24 * GIB, 64), ("cuda", 42_298_834_944, 256), ("cuda", 80 * GIB, 256)],
)
def test_a_batch_has_as_many_sequences_as_were_asked_for_or_as_the_device_has_room_for(
    device: str, total_bytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total_bytes))
    assert seqs_of(0, torch.device(device)) == expected
    assert seqs_of(7, torch.device(device)) == 7


def make_root(root: Path, limit: str | None) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (root / "sys/fs/cgroup/memory.current").write_text("1000000\n")
        (root / "sys/fs/cgroup/memory.stat").write_text(
            "anon 300000\nfile 600000\nactive_file 100000\ninactive_file 500000\nslab_reclaimable 100000\n"
        )
    return root


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 5_120_000), ("max", 5_120_000), ("3000000", 2_600_000), ("999", 0)]
)
def test_available_memory_is_the_machines_or_the_containers(tmp_path: Path, limit: str | None, expected: int) -> None:
    assert available_memory_bytes(CPU, make_root(tmp_path, limit)) == expected


@pytest.mark.parametrize("num_visible", [8, 1])
def test_rings_of_workers_on_every_gpu_that_start_together_take_at_most_half_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_visible: int
) -> None:
    """Each sees all GPUs of the machine, or its own alone: none of the others' claims is seen yet."""
    root, num_gpus = make_root(tmp_path, None), 8
    for number in range(num_gpus):
        (root / f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0").mkdir(parents=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    num_rows = ring_rows_for(WorkerConfig(), LAYOUT, 1 << 40, root=root)
    claimed = 2 * num_gpus * num_rows * LAYOUT.block_bytes  # a prefill and a decode worker on each
    assert 0.4 * 5_120_000 < claimed <= 0.5 * 5_120_000


@pytest.mark.parametrize(
    ("pool_bytes", "ring_bytes"),
    [(GIB // 8, GIB // 8), (GIB, GIB // 4), (8 * GIB, GIB // 2), (100 * GIB, GIB)],
)
def test_a_ring_is_as_large_as_what_is_on_its_way_needs(tmp_path: Path, pool_bytes: int, ring_bytes: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {1 << 40} kB\n")
    layout = KvLayout(1, 1, 64, 1024, DType.FLOAT32)
    num_rows = ring_rows_for(WorkerConfig(), layout, pool_bytes // layout.block_bytes, root=tmp_path)
    assert num_rows * layout.block_bytes == ring_bytes


def test_a_ring_is_never_smaller_than_what_hand_offs_need_to_share_it() -> None:
    assert ring_rows_for(WorkerConfig(), LAYOUT, 2) == MIN_RING_ROWS
    assert ring_rows_for(WorkerConfig(host_ring_bytes=20 * LAYOUT.block_bytes), LAYOUT, 2) == 20
    with pytest.raises(ConfigError, match="--host-ring-memory"):
        ring_rows_for(WorkerConfig(host_ring_bytes=MIN_RING_ROWS * LAYOUT.block_bytes - 1), LAYOUT, 2)
    with pytest.raises(ConfigError, match="--host-ring-memory"):
        check_memory(LAYOUT, 1, CPU, 1 << 50)


@pytest.mark.parametrize(("workers", "share"), [(1, 0.9), (2, 0.45), (4, 0.225)])
def test_workers_on_one_gpu_take_a_share_each_that_leaves_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, share: float
) -> None:
    """However little the host has."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    config, root = WorkerConfig(device_workers=workers, host_workers=workers), make_root(tmp_path, None)
    num_blocks = blocks_that_fit(config, LAYOUT, torch.device("cuda", 0), 10**12, root)
    assert num_blocks == int((1 << 40) * share) // LAYOUT.block_bytes


def test_a_worker_that_is_started_by_hand_has_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    num_blocks = blocks_that_fit(WorkerConfig(), LAYOUT, torch.device("cuda", 0), 10**12)
    assert num_blocks == int((1 << 40) * 0.9) // LAYOUT.block_bytes


def test_workers_of_one_machine_take_at_most_half_of_its_memory(tmp_path: Path) -> None:
    root = make_root(tmp_path, None)
    for workers in (1, 2, 8):
        num_blocks = blocks_that_fit(WorkerConfig(host_workers=workers), LAYOUT, CPU, 10**9, root)
        assert num_blocks == 5_120_000 // 2 // workers // LAYOUT.block_bytes


def test_host_memory_is_registered_on_its_gpu_alone_and_freed_once_that_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Cudart:
        def cudaHostRegister(self, *_: int) -> int:  # noqa: N802 - the driver's names
            log.append("register")
            return 0

        def cudaHostUnregister(self, _: int) -> None:  # noqa: N802
            log.append("unregister")

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        log.append(f"on {device}")
        yield

    monkeypatch.setattr(kv_cache, "_cudart", Cudart)
    monkeypatch.setattr(kv_cache, "synchronize", lambda device: log.append(f"{device} is idle"))
    monkeypatch.setattr(torch.cuda, "device", on)
    host = HostMemory.allocate(64, shared=False)
    assert host.pin(torch.device("cuda", 1))
    host.close()
    host.close()
    assert log == ["on cuda:1", "register", "cuda:1 is idle", "on cuda:1", "unregister"]
