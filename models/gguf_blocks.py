"""What the blocks of GGUF's tensors mean. A block is a few bytes of scales and the codes of 32 or 256 inputs.

    Q8_0  f16 scale, 32 int8                                     Q4_0  f16 scale, 32 codes of 4 bits less 8
    Q5_0  f16 scale, 32 fifth bits, 32 codes of 4 bits, less 16  Q4_1  f16 scale, f16 minimum, 32 codes of 4 bits
    Q4_K  f16 scale and minimum, 8 scales and minima of 6 bits, 256 codes of 4 bits; Q5_K has fifth bits too
    Q6_K  256 codes of 4 bits, of 2 higher bits, 16 int8 scales, f16 scale; codes less 32

Source: the block structures of ggml (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.quantized import QuantForm, QuantizedWeight, pack_int4

PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of tensors that are not quantised, by number."""

_GROUP = 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised type."""

    name: str
    num_inputs: int
    """Number of inputs of a block."""
    num_bytes: int
    decode: Callable[[torch.Tensor, torch.dtype], QuantizedWeight]
    """Blocks `[out, blocks, bytes]` uint8 and the activations' dtype → the weight."""


def _float16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The half-precision number at byte `start` of each block: float32 `[out, blocks, 1]`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Codes in the low halves of all bytes, then those in the high halves: `[…, n]` → `[…, 2 * n]`."""
    return torch.cat((codes & 0x0F, codes >> 4), dim=-1)


def _int4(codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    return QuantizedWeight(QuantForm.INT4, pack_int4(codes.flatten(1)), scales.flatten(1), offsets.flatten(1), dtype)


def _int8(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, dtype: torch.dtype
) -> QuantizedWeight:
    values = codes.to(torch.int8).flatten(1).contiguous()
    return QuantizedWeight(
        QuantForm.INT8, values, scales.flatten(1), None if offsets is None else offsets.flatten(1), dtype
    )


def _q8_0(blocks: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    return _int8(blocks[..., 2:].contiguous().view(torch.int8), _float16(blocks, 0), None, dtype)


def _q4_0(blocks: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    scales = _float16(blocks, 0)
    return _int4(_halves(blocks[..., 2:]), scales, -8 * scales, dtype)


def _q4_1(blocks: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    return _int4(_halves(blocks[..., 4:]), _float16(blocks, 0), _float16(blocks, 2), dtype)


def _q5_0(blocks: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    places = torch.arange(8, dtype=torch.uint8)
    fifth = (blocks[..., 2:6, None] >> places).flatten(-2) & 1  # [out, blocks, 32], input i is bit i
    codes = _halves(blocks[..., 6:]) + (fifth << 4)
    return _int8(codes.to(torch.int16) - 16, _float16(blocks, 0), None, dtype)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of the 8 groups of a block of Q4_K or Q5_K, float32 `[out, blocks, 8]`.

    Twelve bytes: the low 6 bits of the first four are scales, of the next four minima; the last four hold the low
    four bits of the other scales (low half) and minima, whose two high bits are those of the first eight.
    """
    low, middle, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, (last & 0x0F) | (low >> 6 << 4)), dim=-1)
    minima = torch.cat((middle & 63, (last >> 4) | (middle >> 6 << 4)), dim=-1)
    return _float16(blocks, 0) * scales, -_float16(blocks, 2) * minima


def _k_codes(codes: torch.Tensor) -> torch.Tensor:
    """Unpacks codes of Q4_K and Q5_K: 32 bytes hold two groups, the first in the low halves; `[out, blocks, 128]` →
    `[…, 8, 32]`.
    """
    return _halves(codes.reshape(*codes.shape[:2], 4, _GROUP)).view(*codes.shape[:2], 8, _GROUP)


def _q4_k(blocks: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    return _int4(_k_codes(blocks[..., 16:]), *_k_scales(blocks), dtype)


def _q5_k(blocks: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    places = torch.arange(8, dtype=torch.uint8)[:, None]  # bit g of a byte is that of group g
    fifth = (blocks[..., None, 16:48] >> places) & 1  # [out, blocks, 8, 32]
    return _int8(_k_codes(blocks[..., 48:]) + (fifth << 4), *_k_scales(blocks), dtype)


def _q6_k(blocks: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    shape = blocks.shape[:2]
    low = blocks[..., :128].reshape(*shape, 2, 64)  # [out, blocks, halves of 128 inputs, bytes]
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    places = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    codes = _halves(low).view(*shape, 2, 4, 32) | ((high >> places & 3) << 4)
    scales = _float16(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8)  # [out, blocks, 16]
    return _int8(codes.to(torch.int16) - 32, scales, None, dtype)


BLOCKS = {
    2: Blocks("Q4_0", 32, 18, _q4_0),
    3: Blocks("Q4_1", 32, 20, _q4_1),
    6: Blocks("Q5_0", 32, 22, _q5_0),
    8: Blocks("Q8_0", 32, 34, _q8_0),
    12: Blocks("Q4_K", 256, 144, _q4_k),
    13: Blocks("Q5_K", 256, 176, _q5_k),
    14: Blocks("Q6_K", 256, 210, _q6_k),
}
"""By the number of a type."""
