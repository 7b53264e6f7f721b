"""The reference operations against float64. In bfloat16 they round in between too, as transformers does."""

from __future__ import annotations

import pytest
import torch

from kernels.reference_operations import ReferenceOperations
from tandem.errors import InternalError
from tests.kernels import operations_oracle as oracle

OPS = ReferenceOperations()
TOLERANCES = {torch.float64: 1e-6, torch.float32: 3e-6, torch.bfloat16: 4e-2}
"""Float64 is bounded by the angles, which are float32; bfloat16 by up to four roundings, also of the angles."""


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request):
    return request.param


def _close(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("width", [8, 576])
def test_norms_are_exact(width, dtype):
    x, residual, weight = (
        torch.randn(17, width).to(dtype),
        torch.randn(17, width).to(dtype),
        torch.randn(width).to(dtype),
    )
    _close(OPS.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5), dtype)
    total, expected = oracle.add_rms_norm(x, residual, weight, 1e-5)
    _close(OPS.add_rms_norm(x, residual, weight, 1e-5), expected, dtype)
    assert torch.equal(residual, total)


def test_the_gated_activation_is_exact(dtype):
    gate_up = torch.randn(17, 80).to(dtype)
    _close(OPS.silu_mul(gate_up), oracle.gate_mul(gate_up), dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_rotation_turns_in_place_and_stores_by_slot(block_size, normed, dtype):
    oracle.Rotation.make(17, (4, 2), 20, block_size, dtype, normed=normed).check(OPS, TOLERANCES[dtype])


@pytest.mark.parametrize("is_wide", [False, True])
def test_heads_may_be_normed_as_one_row(is_wide, dtype):
    case = oracle.Rotation.make(9, (4, 2), 20, 16, dtype, normed=True, is_whole=True, is_wide=is_wide)
    case.check(OPS, TOLERANCES[dtype])


@pytest.mark.parametrize("gate", oracle.GATES, ids=str)
def test_each_gate_is_exact(gate, dtype):
    weight, x = torch.randn(80, 24).to(dtype) / 4, torch.randn(17, 24).to(dtype)
    expected = oracle.gate_mul(OPS.linear(weight, None)(x), gate)
    _close(OPS.gated_linear(weight, None, gate)(x), expected, dtype)


def test_a_wide_weight_is_multiplied_before_the_norm_is_rounded():
    x, weight = torch.randn(17, 576).bfloat16(), torch.randn(576)
    expected = oracle.rms_norm(x, weight, 1e-5).float().bfloat16()
    assert (OPS.rms_norm(x, weight, 1e-5) != expected).float().mean() < 0.01
    assert (OPS.rms_norm(x, weight.bfloat16(), 1e-5) != expected).float().mean() > 0.2


def test_blocks_are_copied_whole_and_others_stay():
    oracle.check_copy_blocks(OPS)


def test_arguments_that_do_not_fit_are_refused_by_name():
    case = oracle.Rotation.make(3, (4, 2), 8, 4, torch.float32)
    case.cos, case.sin = case.cos[:, :3], case.sin[:, :3]
    with pytest.raises(InternalError, match="cos: D/2 is 3 for D 8"):
        OPS.rotate_and_store(case.qkv, case.rotation, None, case.kv_layer)
