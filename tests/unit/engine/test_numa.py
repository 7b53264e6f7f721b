"""Which memory node a GPU is near to, from a made-up /sys; and the system call, on this machine's."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from engine.numa import node_near, prefer_node

GPU = "0000:41:00.0"


def sysfs(root: Path, num_nodes: int, node: str) -> Path:
    for each in range(num_nodes):
        (root / f"devices/system/node/node{each}").mkdir(parents=True)
    device = root / "bus/pci/devices" / GPU
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    return root


@pytest.mark.parametrize(
    ("num_nodes", "node", "found"), [(2, "1\n", 1), (2, "0\n", 0), (1, "0\n", None), (2, "-1\n", None), (2, "?", None)]
)
def test_the_node_is_what_the_system_says_where_there_are_several(
    tmp_path: Path, num_nodes: int, node: str, found: int | None
) -> None:
    assert node_near(GPU, sysfs(tmp_path, num_nodes, node)) == found


def test_a_device_that_is_not_listed_has_none(tmp_path: Path) -> None:
    assert node_near("0000:42:00.0", sysfs(tmp_path, 2, "1")) is None
    assert node_near(GPU, tmp_path / "nothing") is None


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").is_dir(), reason="the system names no memory nodes")
def test_memory_can_be_used_whatever_the_system_says() -> None:
    fd = os.memfd_create("numa")
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    memory = torch.frombuffer(mmap.mmap(fd, 2 * mmap.PAGESIZE), dtype=torch.uint8)
    os.close(fd)
    prefer_node(memory, 0)  # a sandbox may forbid it
    assert not prefer_node(memory[1:], 0), "memory that begins in a page"
    memory.fill_(7)
    assert bool((memory == 7).all())
