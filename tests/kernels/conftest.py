"""Triton's interpreter, which `tests/conftest.py` asks for where there is no GPU, mended for bfloat16."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def _create_dot_of_values(self, a, b, d, *options):  # type: ignore[no-untyped-def]
        """The interpreter holds bfloat16 as the integers of its bits, and (in 3.9) multiplies those."""
        return _create_dot(self, _widened(a), _widened(b), d, *options)

    interpreter.InterpreterBuilder.create_dot = _create_dot_of_values
