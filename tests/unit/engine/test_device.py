"""Which errors say that a GPU is lost to this process."""

from __future__ import annotations

import pytest
import torch

from engine.device import is_lost


def accelerator_error(message: str, code: int | None = None) -> torch.AcceleratorError:
    error = torch.AcceleratorError(message)
    if code is not None:
        error.error_code = code  # as torch sets it
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (accelerator_error("CUDA error: an illegal memory access was encountered\nSearch for it", 700), True),
        (accelerator_error("in words that no version has used yet", 719), True),
        (accelerator_error("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (accelerator_error("CUDA error: out of memory", 2), False),
        (accelerator_error("CUDA error: invalid configuration argument", 9), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("misaligned address"), False),
        (ValueError("CUDA error: unspecified launch failure"), False),
    ],
)
def test_only_an_error_that_fails_all_later_work_says_that_a_gpu_is_lost(error: Exception, expected: bool) -> None:
    assert is_lost(error) is expected
