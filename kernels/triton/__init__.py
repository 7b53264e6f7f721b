"""The `triton` back-end: attention and operations for CUDA devices. Imports Triton only when it is chosen."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kernels.operations import Kernels

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_CAPABILITY = (8, 0)
"""bfloat16 matrix units and asynchronous copies start with Ampere."""
_absent_arch: int | None = None
COMPILED = "a kernel was compiled while serving"
"""Event name of the log line."""


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run on `device` with `dtype`, or None."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if _absent_arch is not None and device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return _misfit(torch.cuda.get_device_capability(device), dtype)


def _misfit(capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    if capability < _MIN_CAPABILITY:
        return f"needs compute capability 8.0 or later, the device has {capability[0]}.{capability[1]}"
    if dtype not in _DTYPES:
        return f"computes bfloat16, float16 and float32, not {dtype}"
    return None


def stand_in(arch: int) -> None:
    """From now on the CPU stands in for a GPU of compute capability `arch` (see `kernels.triton.absent_gpu`)."""
    global _absent_arch  # noqa: PLW0603
    _absent_arch = arch


def absent_arch() -> int | None:
    """What the CPU stands in for; None if kernels on it are interpreted."""
    return _absent_arch


def load() -> Kernels:
    """Imports Triton and the kernels; called only where `obstacle` is None."""
    from kernels.triton.attention import TritonAttention
    from kernels.triton.operations import TritonOperations
    from kernels.triton.sampling import TritonSampler

    return Kernels(TritonAttention(), TritonOperations(), TritonSampler())
