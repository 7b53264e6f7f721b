"""Weights with scales beside them: FP8 of DeepSeek and Qwen, what compressed-tensors and torchao write.

    weight           [out, in]   float8_e4m3fn, or int8
    weight_packed    [out, in * bits / 32]   int32, codes less 2 ** (bits - 1) are the values; the lowest bits first
    scale            of all, of each output, of each group of inputs, or of each block of outputs and inputs
    zero point       as the scale; of packed weights packed too, along the outputs

Names differ: torchao has `_weight_qdata`, `_weight_scale` and `_weight_zero_point`.

Scales of activations may be there and are not used: activations are multiplied as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.quantized import QuantForm, QuantizedWeight
from models.quantization.scheme import (
    FLOATS,
    INTS,
    Header,
    Shape,
    Spec,
    Weight,
    affine,
    cut_groups,
    unpack_words,
)

_FP8, _INT8 = "F8_E4M3", "I8"
_SCALES = FLOATS | {"F8_E8M0"}
_UNUSED = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "input_scale_ub",
    "output_scale",
    "activation_scale",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledScheme:
    """Values with scales, as config.json describes them."""

    scale: str = "weight_scale"
    """What follows a module's name in that of its scales; likewise the next two."""
    values: str = "weight"
    zeros: str = "weight_zero_point"
    bits: tuple[int, ...] = (8,)
    """Bits of packed values."""
    groups: tuple[int, ...] = ()
    """Inputs that may share a scale, besides all of an output."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale."""

    def specs(self, shape: Shape, found: Mapping[str, Header]) -> dict[str, Spec] | None:
        """See `Scheme.specs`."""
        packed, kind = "weight_packed" in found, found[self.values].dtype if self.values in found else ""
        if not packed and kind not in {_FP8, _INT8} and self.scale not in found:
            return None
        num_outputs, num_inputs = shape
        counts = [-(-num_inputs // group) for group in self.groups]
        scales: list[Shape] = [(), (1,), (num_outputs,), (num_outputs, 1), *((num_outputs, count) for count in counts)]
        if self.block is not None:
            scales.append((-(-num_outputs // self.block[0]), -(-num_inputs // self.block[1])))
        specs = {self.scale: Spec(tuple(scales), _SCALES)}
        specs |= {name: Spec(((), (1,), (num_inputs,)), FLOATS | {_INT8}, is_required=False) for name in _UNUSED}
        if not packed:
            values = Spec((shape,), frozenset((_FP8, _INT8)))
            return specs | {self.values: values, self.zeros: Spec(tuple(scales), INTS | {_INT8}, is_required=False)}
        words = [(num_outputs, -(-num_inputs * bits // 32)) for bits in self.bits]
        zeros = tuple((-(-num_outputs * bits // 32), n) for bits in self.bits for n in (1, *counts))
        return specs | {
            "weight_packed": Spec(tuple(words), INTS),
            "weight_shape": Spec(((2,),), INTS),
            self.zeros: Spec((*zeros, *scales), INTS | {_INT8}, is_required=False),
            "weight_g_idx": Spec(((num_inputs,),), INTS, is_required=False),
        }

    def decode(self, shape: Shape, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        """See `Scheme.decode`; a plain weight if `weight_g_idx` is in another order."""
        scales, group = self._spread(parts[self.scale], shape)
        if "weight_packed" in parts:
            return self._decode_packed(shape, parts, scales, group, dtype)
        values, zeros = parts[self.values], parts.get(self.zeros)
        offsets = None
        if zeros is not None and zeros.any():
            offsets = cut_groups(-self._spread(zeros, shape)[0] * scales, group, shape[1])
        form = QuantForm.INT8 if values.dtype is torch.int8 else QuantForm.FP8
        values = values.clone(memory_format=torch.contiguous_format)  # it may lie in the mapped file
        return QuantizedWeight(form, values, cut_groups(scales, group, shape[1]), offsets, dtype)

    def _decode_packed(
        self, shape: Shape, parts: Mapping[str, torch.Tensor], scales: torch.Tensor, group: int, dtype: torch.dtype
    ) -> Weight:
        num_outputs, num_inputs = shape
        if tuple(parts["weight_shape"].tolist()) != shape:
            raise ValueError(f"weight_shape says {parts['weight_shape'].tolist()}, not {list(shape)}")
        packed = parts["weight_packed"]
        bits = next(bits for bits in self.bits if packed.shape[1] == -(-num_inputs * bits // 32))
        middle = 1 << (bits - 1)
        codes = unpack_words(packed, bits)[:, :num_inputs]
        zeros, given = torch.full_like(scales, middle), parts.get(self.zeros)
        if given is not None and given.dtype is torch.int8:
            zeros = self._spread(given, shape)[0] + middle
        elif given is not None:
            zeros = unpack_words(given.t(), bits)[:, :num_outputs].t()  # [out, groups]
            if zeros.shape != scales.shape:
                raise ValueError(f"scales are of {scales.shape[1]} groups, weight_zero_point of {zeros.shape[1]}")
        if "weight_g_idx" in parts and (parts["weight_g_idx"] >= 0).all():  # -1: in order
            groups = parts["weight_g_idx"].to(torch.int64)
            if groups.max() >= scales.shape[1]:
                raise ValueError(f"weight_g_idx names groups beyond the {scales.shape[1]} of scales")
            if not torch.equal(groups, torch.arange(num_inputs) // group):
                return (scales[:, groups] * (codes.to(torch.float32) - zeros[:, groups])).to(dtype)
        return affine(codes, bits, scales, zeros, group, dtype)

    def _spread(self, table: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, int]:
        """Scales or zeros by output and group, float32 `[out, groups]`, and the inputs of a group."""
        num_outputs, num_inputs = shape
        wide = table.to(torch.float32)
        if wide.numel() == 1:
            return wide.reshape(1, 1).repeat(num_outputs, 1), num_inputs
        if wide.numel() == num_outputs and wide.shape[0] == num_outputs:
            return wide.reshape(num_outputs, 1), num_inputs
        if wide.shape[0] == num_outputs:
            return wide, next(group for group in self.groups if -(-num_inputs // group) == wide.shape[1])
        assert self.block is not None  # the only other shape that `specs` lets through
        return wide.repeat_interleave(self.block[0], 0)[:num_outputs], self.block[1]
