"""How rows of K and V are rounded when they are stored with a scale, by every kernel set that runs without a GPU."""

from __future__ import annotations

import importlib.util
from itertools import product

import numpy as np
import pytest
import torch

from kernels.cpu.library import Library, obstacle
from kernels.cpu.operations import CpuOperations
from kernels.quantized_kv import LARGEST, kv_scales, quantize_rows, read_blocks
from kernels.reference_operations import ReferenceOperations
from tandem.errors import InternalError
from tests.kernels.operations_oracle import Rotation
from tests.kernels.oracle import QUANTIZED, empty_pool
from tests.kernels.tiers import TIERS

SETS = {
    "reference": ReferenceOperations,
    **{f"cpu {tier}": lambda tier=tier: CpuOperations(Library(tier)) for tier in TIERS if obstacle() is None},
}
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    from kernels.triton.operations import TritonOperations

    SETS["triton"] = TritonOperations  # interpreted
STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4}
"""Bound on what rounding changes: int8 in units of the row's largest element, e4m3 of the element itself."""


def rows_of(scale=1.0):
    return torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1)) * scale


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_a_row_is_off_by_half_a_step_at_most(dtype, scale):
    rows = rows_of(scale)
    values, scales = quantize_rows(rows, dtype)
    error = (values.double() * scales.double()[..., None] - rows).abs()
    largest = rows.abs().amax(-1, keepdim=True)
    unit = largest if dtype == torch.int8 else rows.abs().clamp(min=largest / 448 * 2**-6)
    assert (error <= unit.double() * STEP[dtype] * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_row_of_zeros_stays_zeros_and_a_broken_one_broken(dtype):
    rows = rows_of()
    rows[0, 0], rows[1, 1, 5], rows[2, 2, 7] = 0.0, torch.nan, torch.inf
    values, scales = quantize_rows(rows, dtype)
    back = values.float() * scales[..., None]
    assert (back[0, 0] == 0).all()
    assert back[1, 1].isnan().all()
    assert not back[2, 2].isfinite().all()
    assert back[3:].isfinite().all()


def stored():
    """Each set with each shape of heads and blocks, dtype and quantized dtype.

    Triton, interpreted, takes long: there each shape and dtype with one quantized dtype, so that it meets all of both.
    """
    shapes, dtypes = [(64, 16), (20, 5), (16, 1), (80, 4)], [torch.float32, torch.bfloat16]
    for name, (i, shape), (j, dtype), kv_dtype in product(SETS, enumerate(shapes), enumerate(dtypes), QUANTIZED):
        if name != "triton" or kv_dtype == QUANTIZED[(i + j) % 2]:
            yield name, *shape, dtype, kv_dtype


@pytest.mark.parametrize(("name", "head_dim", "block_size", "dtype", "kv_dtype"), list(stored()), ids=str)
def test_every_set_stores_the_same_bytes_of_what_it_computed(name, head_dim, block_size, dtype, kv_dtype):
    operations = SETS[name]()
    plain = Rotation.make(37, (6, 2), head_dim, block_size, dtype, normed=True)
    case = Rotation.make(37, (6, 2), head_dim, block_size, dtype, normed=True)
    case.pool = empty_pool(len(case.pool), 2, 2, block_size, head_dim, kv_dtype)
    values, scales = case.pool.clone(), kv_scales(case.kv_layer).clone()

    operations.rotate_and_store(plain.qkv, plain.rotation, plain.qk_norm, plain.kv_layer)
    operations.rotate_and_store(case.qkv, case.rotation, case.qk_norm, case.kv_layer)

    assert torch.equal(case.qkv, plain.qkv)
    rows, row_scales = quantize_rows(case.qkv[:, 6:], kv_dtype)
    for token, slot in enumerate(case.slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            values[block, 1, :, :, offset] = rows[token].unflatten(0, (2, 2))
            scales[block, :, :, offset] = row_scales[token].unflatten(0, (2, 2))
    assert torch.equal(case.pool.view(torch.int8), values.view(torch.int8))
    assert torch.equal(kv_scales(case.kv_layer).view(torch.int32), scales.view(torch.int32))


@pytest.mark.parametrize("name", SETS)
def test_rows_that_are_no_numbers_are_stored_as_such(name):
    for kv_dtype in QUANTIZED:
        case = Rotation.make(40, (2, 1), 64, 16, torch.bfloat16)
        case.qkv[1, 3, 9], case.qkv[2, 2, 60] = torch.nan, torch.inf
        case.pool = empty_pool(len(case.pool), 2, 1, 16, 64, kv_dtype)
        with np.errstate(invalid="ignore"):  # the interpreter computes with numpy
            SETS[name]().rotate_and_store(case.qkv, case.rotation, None, case.kv_layer)
        blocks = read_blocks(case.kv_layer, torch.arange(len(case.pool)), torch.float32)  # [N, 2, 1, S, D]
        by_slot = blocks.permute(0, 3, 1, 2, 4).flatten(0, 1)  # [N * S, 2, 1, D]
        broken_v, broken_k, whole = by_slot[case.slot_mapping[1:4]]
        assert not broken_v[1].isfinite().all()
        assert broken_v[0].isfinite().all()
        assert not broken_k[0].isfinite().all()
        assert whole.isfinite().all()


def test_a_layer_without_room_for_scales_is_refused():
    case = Rotation.make(5, (4, 2), 16, 16, torch.float32)
    layer = case.kv_layer.to(torch.int8)
    with pytest.raises(InternalError, match=r"kv_layer: .* strides"):
        ReferenceOperations().rotate_and_store(case.qkv, case.rotation, None, layer)
    assert set(LARGEST) == set(QUANTIZED)
