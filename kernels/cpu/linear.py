"""Linear maps on the CPU: bfloat16 weights packed once by oneDNN, float32 weights plain.

oneDNN alone knows the packed layout; the plain weight is not kept here. In float32 its sums err 1.2 to 3 times as
much as plain torch's, and tokens are to equal those of plain torch.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.operations import LinearMap
from tandem.errors import InternalError

_PACKED_FOR_TOKENS = 512
"""The batch that oneDNN lays weights out for. Measured: as fast as any other at 1 to 16 tokens, fastest from 64 on."""


def open_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearMap:
    """Packs `weight` `[out, in]` if oneDNN will; `bias` `[out]`. Raises InternalError if they don't fit each other."""
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise InternalError(f"weight: {list(weight.shape)} with bias {None if bias is None else list(bias.shape)}")
    packed = _pack(weight)
    return _PlainLinear(weight, bias) if packed is None else _PackedLinear(packed, bias, weight.shape[0])


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's layout, or None where it has none: another dtype, processor or build of torch."""
    if weight.dtype != torch.bfloat16:
        return None
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_TOKENS)
    except (AttributeError, RuntimeError):
        return None
    return packed


class _PackedLinear:
    """A weight as oneDNN wants it."""

    __slots__ = ("_bias", "_num_outputs", "_packed")

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None, num_outputs: int) -> None:
        self._packed = packed
        self._bias = bias
        self._num_outputs = num_outputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out]`."""
        if not len(x):
            return x.new_empty(0, self._num_outputs)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self._bias, "none", [], "")
        return out


class _PlainLinear:
    """The weight as it came."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out]`."""
        return F.linear(x, self._weight, self._bias)
