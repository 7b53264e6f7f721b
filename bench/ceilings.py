"""What the machine itself can do, measured in the same run as whatever is compared with it.

Memory: the fastest of a few plain reads of more than the caches hold, and a copy. Arithmetic: the
fastest of a few large square matrix products. A kernel's share of these is all that a figure says;
the absolute values drift with the machine's neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.support.timing import time_s

_READ_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
_GEMM_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
_BUDGET_S = 0.5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of one device. GB is 1e9 bytes; a copy counts each byte twice, read and written."""

    device: str
    """The device type that was measured."""
    threads: int
    """Compute threads of a CPU; 0 on a GPU."""
    read_gb_s: float
    copy_gb_s: float
    bf16_tflop_s: float
    f32_tflop_s: float

    def tflop_s(self, dtype: torch.dtype) -> float:
        """The matrix product's ceiling in `dtype`: float16 counts as bfloat16, anything else as float32.

        Both may be computed in float32, which some processors do faster: a processor without instructions for them.
        """
        if dtype in {torch.bfloat16, torch.float16}:
            return max(self.bf16_tflop_s, self.f32_tflop_s)
        return self.f32_tflop_s


def measure_ceilings(device: torch.device, threads: int | None = None, budget_s: float = _BUDGET_S) -> Ceilings:
    """Takes about ten times `budget_s`. `threads` of a CPU are set for the measurement only; None keeps them.

    Allocates 1 GiB on a CPU, 4 GiB on a GPU, and gives it back.
    """
    with _compute_threads(threads if device.type == "cpu" else None):
        return Ceilings(
            device=device.type,
            threads=torch.get_num_threads() if device.type == "cpu" else 0,
            read_gb_s=measure_read_gb_s(device, _READ_BYTES[device.type], budget_s),
            copy_gb_s=measure_copy_gb_s(device, _READ_BYTES[device.type], budget_s),
            bf16_tflop_s=_fastest_gemm(device, torch.bfloat16, budget_s),
            f32_tflop_s=_fastest_gemm(device, torch.float32, budget_s),
        )


def measure_read_gb_s(device: torch.device, num_bytes: int, budget_s: float = _BUDGET_S) -> float:
    """Reads `num_bytes` of float32 as a dot product, as a matrix times a vector, as a sum: the fastest counts."""
    memory = torch.ones(num_bytes // 4, device=device)
    matrix = memory.view(1024, -1)
    vector = torch.ones(matrix.shape[1], device=device)
    reads = (lambda: torch.dot(memory, memory), lambda: torch.mv(matrix, vector), memory.sum)
    return memory.nbytes / min(time_s([read], device, budget_s) for read in reads) / 1e9


def measure_copy_gb_s(device: torch.device, num_bytes: int, budget_s: float = _BUDGET_S) -> float:
    """Copies `num_bytes` within the device's memory."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_s([lambda: target.copy_(source)], device, budget_s) / 1e9


def measure_gemm_tflop_s(device: torch.device, dtype: torch.dtype, size: int, budget_s: float = _BUDGET_S) -> float:
    """The product of two `size` × `size` matrices."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / time_s([lambda: torch.mm(left, right, out=out)], device, budget_s) / 1e12


def _fastest_gemm(device: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    return max(measure_gemm_tflop_s(device, dtype, size, budget_s) for size in _GEMM_SIZES[device.type])


@contextmanager
def _compute_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
