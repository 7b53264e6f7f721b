"""The native operations against float64, at every tier that this machine runs."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import Library
from kernels.cpu.operations import CpuOperations
from tandem.errors import InternalError
from tests.kernels import operations_oracle as oracle
from tests.kernels.operations_oracle import TOLERANCES
from tests.kernels.oracle import named
from tests.kernels.tiers import TIERS, libraries

pytestmark = pytest.mark.native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = (0, 1, 2, 15, 16, 17, 257)
HEADS = [(1, 1), (2, 1), (9, 3), (8, 1), (16, 1)]
EPS = 1e-5


@pytest.fixture(params=TIERS, scope="module")
def ops(request):
    return CpuOperations(Library(request.param))


@pytest.fixture(scope="module")
def sets():
    """Of every tier; each has its name."""
    return [CpuOperations(library) for library in libraries().values()]


def _close(ops, actual, expected, dtype):
    bound = TOLERANCES[dtype]
    assert actual.dtype == dtype, ops.name
    torch.testing.assert_close(actual.double(), expected, atol=bound, rtol=bound, msg=named(ops.name))


def _rows(tokens, width, dtype, seed=0):
    """`[tokens, width]` with a row stride of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width + 5, generator=generator).to(dtype)[:, 3:-2]


def _copied(rows):
    """With all that lies around them."""
    return rows._base.clone()[:, 3:-2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("width", [1, 8, 40, 576, 1000, 1536])
def test_norms_are_exact_and_the_residual_is_the_rounded_sum(sets, width, dtype, is_wide):
    weight = _rows(1, width, torch.float32 if is_wide else dtype, seed=1)[0]
    for tokens in TOKENS:
        x, before = _rows(tokens, width, dtype, seed=2), _rows(tokens, width, dtype, seed=3)
        normed, (total, expected) = oracle.rms_norm(x, weight, EPS), oracle.add_rms_norm(x, before, weight, EPS)
        for ops in sets:
            _close(ops, ops.rms_norm(x, weight, EPS), normed, dtype)
            residual = _copied(before)
            out = ops.add_rms_norm(x, residual, weight, EPS)
            _close(ops, out, expected, dtype)
            assert out.is_contiguous(), ops.name
            assert torch.equal(residual, total), ops.name
            assert torch.equal(residual._base[:, :3], before._base[:, :3]), ops.name
            assert torch.equal(residual._base[:, -2:], before._base[:, -2:]), ops.name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_activation_is_exact(sets, dtype):
    for tokens in TOKENS:
        for width in (1, 8, 40, 1000, 1536):
            gate_up = 4 * _rows(tokens, 2 * width, dtype)
            expected = oracle.gate_mul(gate_up)
            for ops in sets:
                _close(ops, ops.silu_mul(gate_up), expected, dtype)


def test_the_gated_activation_holds_at_the_ends(ops):
    gate = torch.tensor([-torch.inf, -200.0, -89.0, 0.0, 89.0, 200.0, torch.inf, torch.nan] * 5)
    out = ops.silu_mul(torch.cat((gate, torch.ones(40)))[None])[0, :8]
    expected = torch.tensor([torch.nan, 0.0, 0.0, 0.0, 89.0, 200.0, torch.inf, torch.nan])
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 80, 96, 128, 256])
def test_each_head_dim_is_rotated_and_stored(sets, head_dim, dtype, normed):
    for tokens in (0, 1, 17):
        oracle.Rotation.make(tokens, (4, 2), head_dim, 16, dtype, normed=normed).check_each(sets, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_each_grouping_and_block_size_is_rotated_and_stored(sets, heads, dtype):
    for block_size in (1, 3, 16, 256):
        oracle.Rotation.make(35, heads, 64, block_size, dtype, normed=True).check_each(sets, TOLERANCES[dtype])


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_each_norm_of_heads_is_exact(sets, heads, dtype, is_whole, is_wide):
    case = oracle.Rotation.make(9, heads, 20, 16, dtype, normed=True, is_whole=is_whole, is_wide=is_wide)
    case.check_each(sets, TOLERANCES[dtype])


def test_a_large_batch_is_shared_by_threads(sets):
    x, weight = _rows(1025, 576, torch.float32), _rows(1, 576, torch.float32)[0]
    normed = oracle.rms_norm(x, weight, EPS)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for ops in sets:
            _close(ops, ops.rms_norm(x, weight, EPS), normed, torch.float32)
        oracle.Rotation.make(1025, (9, 3), 64, 16, torch.float32).check_each(sets, TOLERANCES[torch.float32])
    finally:
        torch.set_num_threads(before)


def test_layers_of_one_step_and_steps_of_one_shape_are_told_apart(ops):
    first, second = (oracle.Rotation.make(5, (4, 2), 8, 4, torch.float32, normed=True, seed=seed) for seed in (0, 1))
    first.check(ops, 3e-6)
    second.check(ops, 3e-6)
    second.qkv, second.pool = first.qkv, first.pool
    second.check(ops, 3e-6)


X, WEIGHT = torch.zeros(3, 8), torch.ones(8)
REFUSED = {
    "another dtype": (X.double(), WEIGHT.double(), "x: torch.float64 .* float32, bfloat16 and float16"),
    "a weight of another dtype": (X, WEIGHT.bfloat16(), "weight: dtype is torch.bfloat16, expected torch.float32"),
    "a weight of another width": (X, torch.ones(9), "weight: E is 9, elsewhere 8"),
    "a vector": (WEIGHT, WEIGHT, r"x: shape \[8\] does not have dimensions \[T, E\]"),
    "rows that are not contiguous": (torch.zeros(8, 3).T, WEIGHT, "x: last dimension has stride 3, expected 1"),
    "another device": (X.to("meta"), WEIGHT.to("meta"), "x: .* on meta"),
    "a weight on another device": (X, WEIGHT.to("meta"), "weight: device is meta, expected cpu"),
}


@pytest.mark.parametrize(("x", "weight", "message"), REFUSED.values(), ids=REFUSED)
def test_a_norm_refuses_by_name(ops, x, weight, message):
    with pytest.raises(InternalError, match=message):
        ops.rms_norm(x, weight, EPS)
    with pytest.raises(InternalError, match=message):
        ops.add_rms_norm(x, x.clone(), weight, EPS)


def test_a_residual_that_does_not_fit_is_refused_by_name(ops):
    with pytest.raises(InternalError, match="residual: T is 2, elsewhere 3"):
        ops.add_rms_norm(X, X[:2], WEIGHT, EPS)
    with pytest.raises(InternalError, match=r"residual: dtype is torch\.bfloat16"):
        ops.add_rms_norm(X, X.bfloat16(), WEIGHT, EPS)


def test_an_activation_that_does_not_fit_is_refused_by_name(ops):
    with pytest.raises(InternalError, match=r"gate_up: .* even"):
        ops.silu_mul(torch.zeros(2, 7))
    with pytest.raises(InternalError, match="gate_up: last dimension has stride 2"):
        ops.silu_mul(torch.zeros(8, 2).T)


ALTERED = {
    "cos": (lambda case: {"cos": case.cos.bfloat16()}, "cos: dtype"),
    "slots": (lambda case: {"slot_mapping": case.slot_mapping[:2]}, "slot_mapping: T is 2, elsewhere 5"),
    "pool": (lambda case: {"pool": case.pool.double(), "qkv": case.qkv.double()}, "qkv: torch.float64"),
    "heads": (lambda case: {"qkv": case.qkv[:, :7]}, "qkv: 7 heads do not divide"),
}


@pytest.mark.parametrize(("alter", "message"), ALTERED.values(), ids=ALTERED)
def test_a_rotation_refuses_by_name_also_after_one_that_fitted(ops, alter, message):
    case = oracle.Rotation.make(5, (4, 2), 8, 4, torch.float32)
    case.check(ops, 3e-6)
    for name, value in alter(case).items():
        setattr(case, name, value)
    with pytest.raises(InternalError, match=message):
        ops.rotate_and_store(case.qkv, case.rotation, None, case.kv_layer)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (oracle.QkNorm(torch.ones(8), torch.ones(9), EPS), "k_weight: D is 9, elsewhere 8"),
        (oracle.QkNorm(torch.ones(16), torch.ones(32), EPS, is_whole=True), "q_weight: 16 elements for 8 heads of 8"),
    ],
)
def test_norm_weights_of_another_width_are_refused_by_name(ops, norm, message):
    case = oracle.Rotation.make(5, (4, 2), 8, 4, torch.float32)
    with pytest.raises(InternalError, match=message):
        ops.rotate_and_store(case.qkv, case.rotation, norm, case.kv_layer)


def test_blocks_are_copied_whole_and_others_stay(ops):
    oracle.check_copy_blocks(ops)


@pytest.mark.parametrize("pair", [(0, 4), (-1, 0)])
def test_a_copy_beyond_the_pool_is_refused(ops, pair):
    with pytest.raises(InternalError, match="of a pool of 4"):
        ops.copy_blocks(torch.zeros(4, 8, dtype=torch.uint8), torch.tensor([pair]))
