"""Host memory near a GPU: a machine with several memory nodes reaches one's memory from its own GPUs faster."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import torch

from shell.core_order import SYSFS, memory_nodes
from shell.telemetry.logging import get_logger

_log = get_logger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call."""
_PREFERRED = 1
"""MPOL_PREFERRED: other nodes are taken once the preferred node is full."""
_MASK_BITS = 1024


def node_near(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """The memory node that a PCI device is attached to; None = it does not matter, or is not known."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if len(memory_nodes(sysfs)) > 1 and 0 <= node < _MASK_BITS else None


def prefer_node(memory: torch.Tensor, node: int) -> bool:
    """Pages of `memory`, page-aligned and not touched yet, will come from `node`. Whether the system agreed."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    arguments = memory.data_ptr(), memory.nbytes, _PREFERRED, ctypes.addressof(mask), _MASK_BITS, 0
    return int(libc.syscall(number, *map(ctypes.c_ulong, arguments))) == 0


def bind_near(memory: torch.Tensor, device: torch.device) -> None:
    """Prefers a GPU's node, see `prefer_node`; does nothing where there is a single node, or torch does not name its
    address.
    """
    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):
        return
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    node = node_near(address)
    if node is not None and not prefer_node(memory, node):
        _log.warning("host ring is not near its GPU", node=node, error=os.strerror(ctypes.get_errno()))
