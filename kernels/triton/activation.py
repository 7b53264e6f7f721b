"""SiLU of the gate times up (SwiGLU, arXiv 2002.05202): elementwise, a program per piece of a row.

Computed in float32 and rounded once: within one rounding of the dtype, plus 2^-20 relative.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.spec import check_silu_mul
from kernels.triton.variant import POINTERS, Variant, launch_options

_BLOCK = 1024
_NUM_WARPS = 4


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Operations.silu_mul`: `gate_up` `[T, 2 * I]` with any stride over T → `[T, I]`, contiguous."""
    dims = check_silu_mul(gate_up)
    num_tokens, width = dims["T"], dims["2I"] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        _silu_mul[grid](gate_up, out, gate_up.stride(0), width, BLOCK=_BLOCK, **launch_options(_NUM_WARPS))
    return out


def compile_variants(arch: int) -> Iterator[Variant]:
    """Yields a variant per element size, the same variants on every `arch`."""
    for dtype in (torch.bfloat16, torch.float32):
        yield Variant(
            kernel=_silu_mul,
            signature=dict.fromkeys(("gate_up", "out"), POINTERS[dtype]),
            constexprs={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            label=f"silu_mul {POINTERS[dtype][1:]}",
            aligned=frozenset(("stride", "width")),
        )


@triton.jit
def _silu_mul(gate_up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + columns, product.to(out.dtype.element_ty), mask=inside)
