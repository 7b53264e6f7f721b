"""Tile sizes by shape class, read from the tables shipped beside it; nothing is tuned while serving.

`configs/<family>.json` maps a kernel to rows; a row serves every head_dim up to its own, of its
element size. `bench` measures candidates and rewrites the rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import torch

from kernels.triton import absent_arch
from tandem.errors import InternalError

AttentionKernel = Literal["prefill", "decode"]

INTERPRETER_ARCH = 80
"""Stands in for a device where kernels are interpreted on CPU tensors."""

_SMALL_SHARED_MEMORY = (86, 89, 120, 121)
"""Less shared memory per program (99 KiB) than their generation's data-centre devices."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """How a program is cut and compiled."""

    block_m: int
    """Query rows of a tile; a row is one head of one token."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight: how deep loads run ahead of arithmetic."""


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """What a row of a table is for."""

    head_dim: int
    """Largest head dimension that the class serves."""
    element_bytes: int


def arch_of(device: torch.device) -> int:
    """Compute capability as one number, 80 for sm_80; of the CPU that of the GPU that it stands in for."""
    return _capability_of(device) if device.type == "cuda" else absent_arch() or INTERPRETER_ARCH


@cache
def _capability_of(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def family_of(arch: int) -> str:
    """The table that serves an architecture."""
    if arch in _SMALL_SHARED_MEMORY:
        return "sm86"
    return "sm90" if arch >= 90 else "sm80"


@cache
def shipped_configs(kernel: AttentionKernel, arch: int) -> dict[ShapeClass, KernelConfig]:
    """Every row for `kernel`, narrowest head_dim first: all that `attention_config` can return."""
    text = files("kernels.triton").joinpath("configs", f"{family_of(arch)}.json").read_text("utf-8")
    rows = sorted(json.loads(text)[kernel], key=lambda row: row["head_dim"])
    return {
        ShapeClass(row["head_dim"], row["element_bytes"]): KernelConfig(
            row["block_m"], row["block_n"], row["num_warps"], row["num_stages"]
        )
        for row in rows
    }


@cache
def attention_config(kernel: AttentionKernel, head_dim: int, dtype: torch.dtype, arch: int) -> KernelConfig:
    """The row for a shape class. Raises InternalError if none is as wide as `head_dim`."""
    for shape, config in shipped_configs(kernel, arch).items():
        if shape.element_bytes == dtype.itemsize and shape.head_dim >= head_dim:
            return config
    raise InternalError(f"head_dim: {head_dim} of {dtype} is beyond the {kernel} kernel's tables")
