"""Host arrays to a device in one copy: a step's inputs are many and small, and each copy costs a launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.generic]

_ALIGNMENT = 16
"""As wide as a kernel's widest load."""


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Tensors with the content of `arrays` on `device`; on a CPU they share memory with them.

    On a GPU they are views of one buffer, filled through pinned memory while the host goes on;
    torch keeps the pinned side until the copy has read it.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    staging = torch.empty(packed_bytes(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, staging.numpy())
    return unpack(staging.to(device, non_blocking=True), arrays)


def packed_bytes(arrays: Sequence[Array]) -> int:
    """Bytes that `pack` fills, gaps included."""
    return sum(_padded(array.nbytes) for array in arrays)


def pack(arrays: Sequence[Array], buffer: npt.NDArray[np.uint8]) -> None:
    """Lays `arrays` into `buffer` one after the other, each aligned."""
    start = 0
    for array in arrays:
        buffer[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        start += _padded(array.nbytes)


def unpack(buffer: torch.Tensor, like: Sequence[Array]) -> list[torch.Tensor]:
    """The arrays that `pack` laid into `buffer` `[bytes]` uint8, as views with the shapes and dtypes of `like`."""
    tensors: list[torch.Tensor] = []
    start = 0
    for array in like:
        dtype = torch.from_numpy(array[:0]).dtype
        tensors.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _padded(array.nbytes)
    return tensors


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
