"""Stored numbers of 4 and 8 bits as the activations' dtype, which holds all of them exactly.

Bfloat16 is put together from their bits, two at a time, in assembly: what is left to the compiler takes twice as many
instructions, or those that convert, which run at a quarter of the rate. Triton itself does so for int8.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

_HAS_ASSEMBLY: tl.constexpr = tl.constexpr(not knobs.runtime.interpret)

_FROM_INT4: tl.constexpr = tl.constexpr("""
{
.reg .b32 low, high, one, less, a, b, c, d;
and.b32 low, $4, 0x0F0F0F0F;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 a, low, 0x43434343, 0x4140;
prmt.b32 b, low, 0x43434343, 0x4342;
prmt.b32 c, high, 0x43434343, 0x4140;
prmt.b32 d, high, 0x43434343, 0x4342;
mov.b32 one, 0x3F803F80;
mov.b32 less, 0xC308C308;
fma.rn.bf16x2 $0, a, one, less;
fma.rn.bf16x2 $1, b, one, less;
fma.rn.bf16x2 $2, c, one, less;
fma.rn.bf16x2 $3, d, one, less;
}
""")
"""0x43nn is 128 + nn, of which 136 are taken."""

_FROM_FLOAT8: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b, sign_a, sign_b, factor, zero;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
and.b32 sign_a, a, 0x80008000;
and.b32 sign_b, b, 0x80008000;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 a, a, 0x07F007F0, sign_a, 0xEA;
lop3.b32 b, b, 0x07F007F0, sign_b, 0xEA;
mov.b32 factor, 0x7B807B80;
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 $0, a, factor, zero;
fma.rn.bf16x2 $1, b, factor, zero;
}
""")
"""Exponent and mantissa go where bfloat16 has the lowest of its exponent and the highest of its mantissa; 2 ** 120
makes up for it."""


_FROM_FLOAT4: tl.constexpr = tl.constexpr("""
{
.reg .b32 x, y, a, b, c, d, s, factor, zero;
prmt.b32 x, $4, 0, 0x4140;
prmt.b32 y, $4, 0, 0x4342;
mov.b32 factor, 0x7E807E80;
mov.b32 zero, 0x80008000;
shl.b32 a, x, 6;
shl.b32 s, x, 12;
and.b32 s, s, 0x80008000;
lop3.b32 a, a, 0x01C001C0, s, 0xEA;
shl.b32 b, y, 6;
shl.b32 s, y, 12;
and.b32 s, s, 0x80008000;
lop3.b32 b, b, 0x01C001C0, s, 0xEA;
shl.b32 c, x, 2;
shl.b32 s, x, 8;
and.b32 s, s, 0x80008000;
lop3.b32 c, c, 0x01C001C0, s, 0xEA;
shl.b32 d, y, 2;
shl.b32 s, y, 8;
and.b32 s, s, 0x80008000;
lop3.b32 d, d, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 $0, a, factor, zero;
fma.rn.bf16x2 $1, b, factor, zero;
fma.rn.bf16x2 $2, c, factor, zero;
fma.rn.bf16x2 $3, d, factor, zero;
}
""")
"""As for eight bits, with 2 ** 126, of the low halves of four bytes and of their high ones."""


@triton.jit
def from_int8(codes, dtype: tl.constexpr):
    """Widens int8 codes to `dtype`."""
    return codes.to(tl.float32).to(dtype)  # not at once: the interpreter takes bfloat16 for an integer


@triton.jit
def from_int4(codes, dtype: tl.constexpr):
    """`(low, high)` halves of uint8, each 0 to 15, less 8."""
    if _HAS_ASSEMBLY and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_FROM_INT4, "=r,=r,=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        low, high = (codes & 0x0F).to(tl.float32), (codes >> 4).to(tl.float32)
        return (low - 8.0).to(dtype), (high - 8.0).to(dtype)


@triton.jit
def from_float8(codes, dtype: tl.constexpr):
    """Widens float8_e4m3fn codes, stored as int8, to `dtype`; NaN becomes 480."""
    if _HAS_ASSEMBLY and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_FROM_FLOAT8, "=r,=r,r", [codes], tl.bfloat16, True, 4)
    else:
        bits = (codes.to(tl.int32) << 20) & -2014314496
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)


@triton.jit
def from_float4(codes, dtype: tl.constexpr):
    """`(low, high)` halves of uint8, each e2m1."""
    if _HAS_ASSEMBLY and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_FROM_FLOAT4, "=r,=r,=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        return _from_float4(codes.to(tl.int32), dtype), _from_float4(codes.to(tl.int32) >> 4, dtype)


@triton.jit
def _from_float4(codes, dtype: tl.constexpr):
    bits = (codes & 7) << 22 | (codes & 8) << 28
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(dtype)


@triton.jit
def from_exponent(codes):
    """Powers of 2 as float32 from e8m0, or float32 as it is; the least of e8m0 becomes 0."""
    if codes.dtype == tl.uint8:
        return (codes.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return codes
