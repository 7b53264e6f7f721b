"""RMSNorm, alone or with the residual sum before it: one program per row, the row in registers.

Sums are float32 and the result is rounded once, so an element is within one rounding of its
dtype, plus E * 2^-24 relative, of the exact norm. The residual sum is rounded to its dtype
first: the norm is that of what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.spec import check_rms_norm
from kernels.triton.variant import POINTERS, Variant, launch_options
from tandem.errors import InternalError

MAX_WIDTH = 16384
"""The most elements of a row that a program holds."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.rms_norm`: x `[T, E]` with any stride over T → `[T, E]`, contiguous."""
    return _normed(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.add_rms_norm`: adds x to `residual` in place, both `[T, E]` with any stride over T."""
    return _normed(x, residual, weight, eps)


def _normed(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    width = check_rms_norm(x, weight, residual)["E"]
    if width > MAX_WIDTH:
        raise InternalError(f"x: E is {width}, at most {MAX_WIDTH} fit")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block, num_warps = _tile(width)
        added = x if residual is None else residual
        strides = x.stride(0), 0 if residual is None else residual.stride(0)
        _rms_norm[(x.shape[0],)](
            *(x, added, weight, out, *strides, width, eps),
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            **launch_options(num_warps),
        )
    return out


def compile_variants(arch: int) -> Iterator[Variant]:
    """A narrow and the widest row of each kind; alike on every `arch`."""
    for dtype, width, has_residual in (
        (torch.bfloat16, 576, True),
        (torch.bfloat16, 4096, False),
        (torch.bfloat16, MAX_WIDTH, True),
        (torch.float32, MAX_WIDTH, True),
    ):
        block, num_warps = _tile(width)
        yield Variant(
            kernel=_rms_norm,
            signature={**dict.fromkeys(("x", "residual", "weight", "out"), POINTERS[dtype]), "eps": "fp32"},
            constexprs={"BLOCK": block, "HAS_RESIDUAL": has_residual},
            num_warps=num_warps,
            label=f"{'add_' if has_residual else ''}rms_norm {POINTERS[dtype][1:]} E={width}",
            aligned=frozenset(("x_stride", "residual_stride", "width")),
        )


def _tile(width: int) -> tuple[int, int]:
    """Elements and warps of a program: about 16 elements a thread, as far as 16 warps reach."""
    block: int = triton.next_power_of_2(width)
    return block, min(16, max(1, block // 512))


@triton.jit
def _rms_norm(
    x, residual, weight, out, x_stride, residual_stride, width, eps,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = residual + row * residual_stride + columns
        summed = (values + tl.load(stream, mask=inside, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
        tl.store(stream, summed, mask=inside)
        values = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)
