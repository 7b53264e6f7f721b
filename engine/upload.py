"""Host arrays to a device in one copy: a step's inputs are many and small, and each copy costs a launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.generic]

_ALIGNMENT = 16
"""Bytes of a kernel's widest load."""


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Tensors with the content of `arrays` on `device`; on a CPU they share memory with them, on a GPU they are views
    of one buffer.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack(upload_packed(arrays, device), arrays)


def upload_packed(arrays: Sequence[Array], device: torch.device) -> torch.Tensor:
    """Returns `arrays` on `device` as `pack` lays them.

    A GPU's buffer is filled through pinned memory while the host goes on; torch keeps the pinned side until the copy
    has read it.
    """
    return pack(arrays, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def packed_bytes(arrays: Sequence[Array]) -> int:
    """Returns how many bytes `pack` lays `arrays` into."""
    return sum(_padded(array.nbytes) for array in arrays)


def pack(arrays: Sequence[Array], *, pin_memory: bool) -> torch.Tensor:
    """Lays `arrays` one after the other, each aligned; returns `[bytes]` uint8."""
    packed = torch.empty(packed_bytes(arrays), dtype=torch.uint8, pin_memory=pin_memory)
    pack_into(packed.numpy(), arrays)
    return packed


def pack_into(buffer: npt.NDArray[np.uint8], arrays: Sequence[Array]) -> None:
    """The same in `buffer`, which may be longer."""
    start = 0
    for array in arrays:
        buffer[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        start += _padded(array.nbytes)


def unpack(buffer: torch.Tensor, like: Sequence[Array]) -> list[torch.Tensor]:
    """The arrays that `pack` laid into `buffer` `[bytes]` uint8, as views with the shapes and dtypes of `like`."""
    tensors: list[torch.Tensor] = []
    start = 0
    for array in like:
        flat = buffer[start : start + array.nbytes].view(_torch_dtype(array.dtype))
        tensors.append(flat if array.ndim == 1 else flat.view(array.shape))
        start += _padded(array.nbytes)
    return tensors


@cache
def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
