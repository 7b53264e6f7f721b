"""Weights of GPTQ (arXiv 2210.17323) by AutoGPTQ or GPTQModel, and of AWQ (arXiv 2306.00978) by AutoAWQ.

Both hold `weight = scale * (code - zero)` with codes packed into int32 words, inputs first:

    GPTQ   qweight [in * bits / 32, out]   a word holds neighbouring inputs
    AWQ    qweight [in, out * bits / 32]   a word holds neighbouring outputs, in the order 0 2 4 6 1 3 5 7
    both   qzeros [groups, out * bits / 32], packed along the outputs; scales [groups, out]

GPTQ's first version stores zeros less one. `g_idx` names the group of each input; where inputs were taken in another
order than they lie, no two neighbours share a scale, and the weight is dequantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from models.quantization.scheme import FLOATS, INTS, Header, Shape, Spec, Weight, affine, unpack_words

_AWQ_BITS = 4
_AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight neighbouring outputs."""
_PARTS = frozenset(("qweight", "qzeros", "scales"))


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """GPTQ in 4 and 8 bits."""

    bits: tuple[int, ...]
    """What config.json names, a module may have any of them; likewise `groups`, where -1 is a scale per output."""
    groups: tuple[int, ...]
    zeros_less_one: bool

    def specs(self, shape: Shape, found: Mapping[str, Header]) -> dict[str, Spec] | None:
        """See `Scheme.specs`. Old files have a bias of zeros where the model has none."""
        if not found.keys() & _PARTS:
            return None
        num_outputs, num_inputs = shape
        counts = [-(-num_inputs // _group_size(group, num_inputs)) for group in self.groups]
        return {
            "qweight": Spec(tuple((num_inputs * bits // 32, num_outputs) for bits in self.bits), INTS),
            "qzeros": Spec(tuple((n, num_outputs * bits // 32) for n in counts for bits in self.bits), INTS),
            "scales": Spec(tuple((n, num_outputs) for n in counts), FLOATS),
            "g_idx": Spec(((num_inputs,),), INTS, is_required=False),
            "bias": Spec(((num_outputs,),), FLOATS, is_required=False, is_zero=True),
        }

    def decode(self, shape: Shape, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        """See `Scheme.decode`; a plain weight if `g_idx` is in another order."""
        num_inputs = shape[1]
        bits = len(parts["qweight"]) * 32 // num_inputs
        codes = unpack_words(parts["qweight"].t(), bits)  # [out, in]
        scales, zeros = parts["scales"].t(), unpack_words(parts["qzeros"], bits).t()  # [out, groups] each
        if scales.shape != zeros.shape:
            raise ValueError(f"scales are of {scales.shape[1]} groups, qzeros of {zeros.shape[1]}")
        if self.zeros_less_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)  # uint8: the greatest is followed by 0
        counts = {-(-num_inputs // size): size for size in (_group_size(each, num_inputs) for each in self.groups)}
        group = counts[scales.shape[1]]
        if "g_idx" in parts:
            groups = parts["g_idx"].to(torch.int64)
            if groups.min() < 0 or groups.max() >= scales.shape[1]:
                raise ValueError(f"g_idx names groups beyond the {scales.shape[1]} of scales")
            if not torch.equal(groups, torch.arange(num_inputs) // group):
                wide = scales.to(torch.float32)[:, groups] * (codes.to(torch.float32) - zeros[:, groups])
                return wide.to(dtype)
        return affine(codes, bits, scales, zeros, group, dtype)


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """AWQ in 4 bits, its `gemm` order."""

    group: int
    """-1 is a scale per output."""

    def specs(self, shape: Shape, found: Mapping[str, Header]) -> dict[str, Spec] | None:
        """See `Scheme.specs`."""
        if not found.keys() & _PARTS:
            return None
        num_outputs, num_inputs = shape
        count = -(-num_inputs // _group_size(self.group, num_inputs))
        words = num_outputs * _AWQ_BITS // 32
        return {
            "qweight": Spec(((num_inputs, words),), INTS),
            "qzeros": Spec(((count, words),), INTS),
            "scales": Spec(((count, num_outputs),), FLOATS),
        }

    def decode(self, shape: Shape, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        """See `Scheme.decode`."""
        codes, zeros = (_in_order(unpack_words(parts[name], _AWQ_BITS)).t() for name in ("qweight", "qzeros"))
        group = _group_size(self.group, shape[1])
        return affine(codes.contiguous(), _AWQ_BITS, parts["scales"].t(), zeros, group, dtype)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Puts the outputs of AWQ's codes `[rows, out]` in order."""
    return codes.view(len(codes), -1, len(_AWQ_POSITIONS))[:, :, _AWQ_POSITIONS].flatten(1)


def _group_size(group: int, num_inputs: int) -> int:
    return num_inputs if group == -1 else group
