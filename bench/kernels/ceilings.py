"""What the machine itself can do, measured in the same run as whatever is compared with it.

Memory: the fastest of a few plain reads of more than the caches hold, and a copy. Arithmetic: the
fastest of a few large square matrix products. A kernel's share of these is all that a figure says;
the absolute values drift with the machine's neighbours.
"""

from __future__ import annotations

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


def measure_ceilings(device: torch.device) -> Ceilings:
    """Takes about five seconds. Allocates 1 GiB on a CPU, 4 GiB on a GPU, and gives it back."""
    source = torch.ones(_READ_BYTES[device.type] // 4, device=device)
    target, matrix = torch.empty_like(source), source.view(1024, -1)
    vector = torch.ones(matrix.shape[1], device=device)
    reads = (lambda: torch.dot(source, source), lambda: torch.mv(matrix, vector), source.sum)
    read_s = min(time_s([read], device, _BUDGET_S) for read in reads)
    copy_s = time_s([lambda: target.copy_(source)], device, _BUDGET_S)
    return Ceilings(
        device=device.type,
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        read_gb_s=source.nbytes / read_s / 1e9,
        copy_gb_s=2 * source.nbytes / copy_s / 1e9,
        bf16_tflop_s=_fastest_gemm(device, torch.bfloat16),
        f32_tflop_s=_fastest_gemm(device, torch.float32),
    )


def _fastest_gemm(device: torch.device, dtype: torch.dtype) -> float:
    return max(_gemm_tflop_s(device, dtype, size) for size in _GEMM_SIZES[device.type])


def _gemm_tflop_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The product of two `size` × `size` matrices."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / time_s([lambda: torch.mm(left, right, out=out)], device, _BUDGET_S) / 1e12
