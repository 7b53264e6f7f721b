"""Sums of segments of a product in one native call (`src/linear.cpp`), added as `kernels.group.tree_sum` adds."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch

from kernels.cpu.library import Library
from kernels.cpu.linear import FORMS, NativeLinear
from kernels.operations import LinearMap
from kernels.spec import Dims


def open_segments(library: Library, segments: Sequence[LinearMap], borders: Sequence[int]) -> NativeSegments | None:
    """See `Operations.segment_sum`; None if not all segments are native."""
    maps = [each for each in segments if isinstance(each, NativeLinear)]
    return NativeSegments(library, maps, borders) if len(maps) == len(segments) else None


class NativeSegments:
    """Wide maps of neighbouring inputs. A token's result does not depend on the others, as a map's."""

    __slots__ = ("_addresses", "_call", "_dtype", "_maps", "_num_inputs", "_starts")

    def __init__(self, library: Library, maps: Sequence[NativeLinear], borders: Sequence[int]) -> None:
        self._maps, self._dtype, self._num_inputs = tuple(maps), maps[0].dtype, borders[-1]
        self._addresses = torch.tensor([each.product_address for each in maps])
        self._starts = torch.tensor(borders[:-1])
        argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)
        self._call = library.bind(f"segments_{FORMS[self._dtype][1]}", *argtypes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]` → `[T, out]` float32. Raises InternalError by name."""
        Dims(**{"in": self._num_inputs}).check("x", x, ("T", "in"), self._dtype, torch.device("cpu"))
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(len(x), self._maps[0].num_outputs, dtype=torch.float32)
        parts = (self._addresses.data_ptr(), self._starts.data_ptr(), len(self._maps))
        self._call(*parts, x.data_ptr(), x.stride(0), len(x), out.data_ptr())
        return out
