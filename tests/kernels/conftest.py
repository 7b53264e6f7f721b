"""A machine without native kernels; Triton's interpreter where there is no GPU, mended for bfloat16."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu import build, library


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where native libraries are looked for, empty."""
    caches = (library.tier_obstacle, library._best, library._open)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    for each in caches:
        each.cache_clear()
    yield tmp_path
    for each in caches:
        each.cache_clear()


@pytest.fixture
def no_library(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """There is no compiler, either."""
    monkeypatch.setenv("PATH", "")
    return elsewhere


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
