"""Linear maps on the CPU: bfloat16 weights packed once, for our own tiles on AMX, else for oneDNN; float32 plain.

A packed weight takes the plain one's place; only its owner knows the layout. Float32 stays with plain torch: oneDNN's
sums err up to three times as much, and tokens are to equal those of plain torch.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch

from kernels.cpu.library import Library
from kernels.cpu.packed_memory import PackedMemory
from kernels.operations import LinearMap, PlainLinear
from kernels.spec import Dims
from tandem.errors import InternalError

_TILED_TIER = "amx"
_DEPTH = 32
"""Inputs of one AMX tile: a weight's must be a multiple."""
_TILE = 16
"""Outputs of one AMX tile; a weight's are rounded up."""
_MEMORY = PackedMemory()

_ONEDNN_TOKENS = 512
"""The batch that oneDNN lays weights out for. Measured: as fast as any other at 1 to 16 tokens, fastest from 64 on."""

_SHORT_TOKENS = 16
_SHORT_BYTES = 1 << 22
"""Up to so many tokens and bytes of weights a call keeps the GIL: it returns within a fifth of a millisecond."""


def open_linear(library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearMap:
    """The fastest map for `weight` `[out, in]` and `bias` `[out]`. Raises InternalError if they do not fit."""
    dims = _check(weight, bias)
    if _has_tiles(library, weight):
        return _TiledLinear(library, weight, bias, gated=False)
    if weight.dtype == torch.bfloat16:
        packed = _pack_for_onednn(weight)
        if packed is not None:
            return _OneDnnLinear(packed, bias, dims["out"])
    return PlainLinear(weight, bias)


def open_gated_linear(library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearMap | None:
    """The map with `silu(gate) * up` of its result, rounded once, for `weight` `[2 * I, in]` and `bias` `[2 * I]`.

    None where it is not made in one. Raises InternalError if they do not fit.
    """
    if _check(weight, bias)["out"] % 2:
        raise InternalError(f"weight: {len(weight)} rows are not as many of gate and up")
    return _TiledLinear(library, weight, bias, gated=True) if _has_tiles(library, weight) else None


def _check(weight: torch.Tensor, bias: torch.Tensor | None) -> Dims:
    dims = Dims()
    dims.check("weight", weight, ("out", "in"), weight.dtype, weight.device)
    if bias is not None:
        dims.check("bias", bias, ("out",), weight.dtype, weight.device)
    return dims


def _has_tiles(library: Library, weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and library.tier == _TILED_TIER and weight.shape[1] % _DEPTH == 0


class _TiledLinear:
    """A weight in the order in which `src/linear.cpp` reads it. A token's result does not depend on the others."""

    __slots__ = (
        *("_bias", "_bias_address", "_gated", "_long", "_num_inputs", "_num_outputs"),
        *("_packed", "_packed_address", "_short", "_short_tokens"),
    )

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> None:
        rows, self._num_inputs = weight.shape
        parts = 2 if gated else 1
        self._gated = int(gated)
        self._num_outputs = rows // parts
        padded = -(-self._num_outputs // _TILE) * _TILE * parts
        self._packed = _MEMORY.take(padded * self._num_inputs)
        self._packed_address = self._packed.data_ptr()
        pack = library.bind("pack_linear_bf16", c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64)
        pack(weight.data_ptr(), weight.stride(0), self._packed_address, rows, self._num_inputs, self._gated)
        self._bias = bias
        self._bias_address = None if bias is None else bias.data_ptr()
        argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64)
        self._short, self._long = (library.bind("linear_bf16", *argtypes, keeps_gil=keeps) for keeps in (True, False))
        self._short_tokens = _SHORT_TOKENS if 2 * weight.numel() <= _SHORT_BYTES else 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]`, rows contiguous → `[T, out]`. Sums in float32, rounded once. Raises InternalError by name."""
        shape = x.shape
        if (
            len(shape) != 2
            or shape[1] != self._num_inputs
            or x.dtype is not torch.bfloat16
            or x.stride()[1] != 1
            or not x.is_cpu
        ):
            Dims(**{"in": self._num_inputs}).check("x", x, ("T", "in"), torch.bfloat16, torch.device("cpu"))
            raise InternalError(f"x: {list(shape)} cannot be multiplied")
        tokens, outputs = shape[0], self._num_outputs
        out = torch.empty(tokens, outputs, dtype=torch.bfloat16)
        call = self._short if tokens <= self._short_tokens else self._long
        call(
            *(x.data_ptr(), x.stride()[0], self._packed_address, self._bias_address, out.data_ptr()),
            *(tokens, self._num_inputs, outputs, self._gated),
        )
        return out


def _pack_for_onednn(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's layout, or None where it has none: another processor or build of torch."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_TOKENS)
    except (AttributeError, RuntimeError):
        return None
    return packed


@dataclass(frozen=True, slots=True, eq=False)
class _OneDnnLinear:
    """A weight as oneDNN wants it."""

    packed: torch.Tensor
    bias: torch.Tensor | None
    num_outputs: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out]`."""
        if not len(x):
            return x.new_empty(0, self.num_outputs)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return out
