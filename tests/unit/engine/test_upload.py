"""Packing a step's arrays into one buffer and finding them again."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.upload import pack, unpack, upload
from tests.kernels.devices import needs_gpu

ARRAYS = st.lists(
    st.tuples(st.sampled_from([np.int32, np.int64, np.float32]), st.integers(0, 5), st.integers(1, 4)), max_size=6
)


@given(ARRAYS)
def test_arrays_come_back_as_they_were_and_aligned(shapes: list[tuple[type, int, int]]) -> None:
    arrays = [
        np.arange(rows * width).reshape(rows, width).astype(dtype) + i for i, (dtype, rows, width) in enumerate(shapes)
    ]
    found = unpack(pack(arrays, pin_memory=False), arrays)
    for array, tensor in zip(arrays, found, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.array([1, 2], dtype=np.int64)
    (tensor,) = upload([array], torch.device("cpu"))
    tensor[0] = 7
    assert array[0] == 7


@needs_gpu
def test_a_gpu_gets_them_all() -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, dtype=np.int64), np.arange(3, dtype=np.int64)]
    for array, tensor in zip(arrays, upload(arrays, torch.device("cuda", 0)), strict=True):
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))
