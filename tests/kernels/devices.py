"""Where a kernel in Triton runs: interpreted on the CPU, or compiled on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
_CPU = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the GPU runs the same tests"))
_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")])
on_each_device = pytest.mark.parametrize("device", [_CPU, _CUDA])
on_a_gpu = pytest.mark.parametrize("device", [_CUDA])


def needs_gpu(test: Callable[..., Any]) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_GPU, reason="no GPU")(test))
