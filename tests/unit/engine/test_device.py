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
    "error",
    [
        accelerator_error("CUDA error: an illegal memory access was encountered\nSearch for it", 700),
        accelerator_error("in words that no version has used yet", 719),
        accelerator_error("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
    ],
)
def test_a_context_that_fails_all_later_work_is_lost(error: Exception) -> None:
    assert is_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        accelerator_error("CUDA error: out of memory", 2),
        accelerator_error("CUDA error: invalid configuration argument", 9),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("misaligned address"),
        ValueError("CUDA error: unspecified launch failure"),
    ],
)
def test_any_other_error_is_not(error: Exception) -> None:
    assert not is_lost(error)
