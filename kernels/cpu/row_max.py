"""The token with the greatest logit of each row, in C++ (`src/row_max.cpp`); 16 bits without a detour."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch

from kernels.cpu.library import Library
from kernels.cpu.operations import COMPUTED, DTYPES
from kernels.spec import Dims
from tandem.errors import InternalError


class RowMax:
    """Implements `kernels.sampling.RowMaximum` for float32, bfloat16 and float16 on the CPU."""

    __slots__ = ("_calls",)

    def __init__(self, library: Library) -> None:
        argtypes = (c_void_p, c_int64, c_int64, c_int64, c_void_p)
        self._calls = {dtype: library.bind(f"first_max_{suffix}", *argtypes) for dtype, suffix in DTYPES.items()}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RowMaximum`; V ≥ 1. Raises InternalError by name."""
        Dims().check("rows", rows, ("R", "V"), rows.dtype, torch.device("cpu"))
        call = self._calls.get(rows.dtype)
        if call is None or not rows.shape[1]:
            raise InternalError(f"rows: {rows.dtype} {list(rows.shape)}; needs {COMPUTED}, V at least 1")
        indices = torch.empty(len(rows), dtype=torch.int64)
        call(rows.data_ptr(), rows.stride(0), *rows.shape, indices.data_ptr())
        return indices
