"""Linear maps on the CPU against float64, at every tier that this machine runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.cpu.library import Library
from kernels.cpu.linear import open_embedding, open_linear
from kernels.cpu.operations import CpuOperations
from kernels.cpu.packed_memory import PackedMemory
from tandem.errors import InternalError
from tests.kernels.operations_oracle import GATES, TOLERANCES, gate_mul
from tests.kernels.oracle import named
from tests.kernels.tiers import TIERS, libraries

pytestmark = pytest.mark.native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=TIERS, scope="module")
def library(request):
    return Library(request.param)


@pytest.fixture(scope="module")
def operations():
    return {tier: CpuOperations(library) for tier, library in libraries().items()}


def _normal(*shape, dtype, seed=0):
    """`shape`, with a row stride of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator).to(dtype)[..., 1:-2]


def _check(linears, weight, bias, x):
    """Each of `linears`, by tier."""
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    bound = 2**-22 * weight.shape[1]  # one rounding of float32 per product
    for tier, linear in linears.items():
        out = linear(x)
        assert out.dtype == weight.dtype, tier
        assert out.shape == (len(x), len(weight)), tier
        torch.testing.assert_close(out.double(), expected, atol=bound, rtol=TOLERANCES[weight.dtype], msg=named(tier))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(8, 8), (1, 32), (3, 7), (17, 64), (33, 32), (50, 40), (960, 576), (70, 1536)], ids=str
)
def test_each_shape_is_exact_for_any_number_of_tokens(operations, shape, has_bias, dtype):
    weight = _normal(*shape, dtype=dtype)
    bias = _normal(1, shape[0], dtype=dtype)[0] if has_bias else None
    linears = {tier: each.linear(weight, bias) for tier, each in operations.items()}
    for tokens in (0, 1, 2, 15, 16, 17, 32, 33, 70):
        _check(linears, weight, bias, _normal(tokens, shape[1], dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (1, 32), (16, 7), (48, 64), (50, 40), (97, 576)], ids=str)
def test_rows_of_a_packed_weight_are_those_that_were_packed(operations, shape, dtype):
    weight = _normal(*shape, dtype=dtype)
    embeddings = {tier: each.tied_embedding(each.linear(weight, None)) for tier, each in operations.items()}
    for ids in (torch.arange(len(weight)), torch.tensor([0, len(weight) - 1, 0]), torch.tensor([], dtype=torch.int64)):
        for tier, embedding in embeddings.items():
            assert torch.equal(embedding(ids), weight[ids]), tier


@pytest.mark.parametrize("ids", [[-1], [0, 8]], ids=str)
def test_an_id_that_is_no_row_is_refused(library, ids):
    embedding = open_embedding(library, open_linear(library, _normal(8, 8, dtype=torch.float32), None, None))
    with pytest.raises(InternalError, match="token_ids"):
        embedding(torch.tensor(ids))


def test_many_tokens_and_threads_are_cut_into_rectangles(operations):
    weight, x = _normal(336, 992, dtype=torch.bfloat16), _normal(1061, 992, dtype=torch.bfloat16, seed=1)
    linears = {tier: each.linear(weight, None) for tier, each in operations.items()}
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            _check(linears, weight, None, x)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (2, 32), (34, 64), (80, 992)], ids=str)
def test_a_gated_map_is_exact_for_any_number_of_tokens(operations, shape, has_bias, dtype):
    weight = _normal(*shape, dtype=dtype) / shape[1] ** 0.5
    bias = _normal(1, shape[0], dtype=dtype)[0] if has_bias else None
    linears = {tier: each.gated_linear(weight, bias) for tier, each in operations.items()}
    bound = 4 * TOLERANCES[dtype]  # gate and up may be rounded too
    for tokens in (0, 1, 16, 17, 33, 70, 300):
        x = _normal(tokens, shape[1], dtype=dtype, seed=1)
        expected = gate_mul(x.double() @ weight.double().T + (0 if bias is None else bias.double()))
        for tier, linear in linears.items():
            out = linear(x)
            assert out.dtype == dtype, tier
            torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound, msg=named(tier))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_each_gate_is_exact(operations, gate, dtype):
    weight = _normal(80, 96, dtype=dtype) / 4
    bias = _normal(1, 80, dtype=dtype)[0]
    linears = {tier: each.gated_linear(weight, bias, gate) for tier, each in operations.items()}
    bound = 4 * TOLERANCES[dtype]
    for tokens in (1, 33, 300):
        x = _normal(tokens, 96, dtype=dtype, seed=1)
        expected = gate_mul(x.double() @ weight.double().T + bias.double(), gate)
        for tier, linear in linears.items():
            torch.testing.assert_close(linear(x).double(), expected, atol=bound, rtol=bound, msg=named(tier))


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_far_gates_are_zero_or_themselves(library, gate):
    far = torch.tensor([-3e38, -200.0, 0.0, 2.0, 200.0, 3e38])
    linear = CpuOperations(library).gated_linear(torch.cat((far, torch.ones(6)))[:, None], None, gate)
    found = linear(torch.ones(1, 1))[0]
    expected = gate_mul(torch.cat((far, torch.ones(6)))[None], gate)[0].float()
    torch.testing.assert_close(found, expected, atol=1e-30, rtol=1e-6)


def test_a_gated_map_refuses_by_name(library):
    with pytest.raises(InternalError, match="weight: 7 rows"):
        CpuOperations(library).gated_linear(torch.zeros(7, 32), None)
    with pytest.raises(InternalError, match="bias: out is 7, elsewhere 8"):
        CpuOperations(library).gated_linear(torch.zeros(8, 32), torch.zeros(7), None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_token_has_the_same_bits_in_any_batch(operations, is_gated, dtype):
    weight, x = _normal(80, 1600, dtype=dtype), _normal(600, 1600, dtype=dtype, seed=1)
    for tier, each in operations.items():
        linear = (each.gated_linear if is_gated else each.linear)(weight, None)
        whole = linear(x)
        for first, last in ((0, 1), (5, 6), (0, 16), (17, 50), (100, 164), (10, 110), (100, 600)):
            assert torch.equal(linear(x[first:last]), whole[first:last]), (tier, first)


def test_float32_errs_no_more_than_plain_torch(operations):
    weight, x = _normal(64, 4096, dtype=torch.float32), _normal(40, 4096, dtype=torch.float32, seed=1)
    expected = x.double() @ weight.double().T
    theirs = (functional.linear(x, weight) - expected).pow(2).mean()
    for tier, each in operations.items():
        ours = (each.linear(weight, None)(x) - expected).pow(2).mean()
        assert ours <= 1.1 * theirs, tier


def test_packed_memory_is_aligned_kept_apart_and_freed():
    memory = PackedMemory()
    first, second, large = memory.take(5), memory.take(1 << 21), memory.take(1 << 26)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (first, second, large))
    assert second.data_ptr() - first.data_ptr() == 64
    for value, tensor in enumerate((first, second, large)):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in (first, second, large)] == [[0], [1], [2]]
    chunk = memory._chunk
    del first, second, tensor, large
    assert chunk() is None


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 64), "x: dtype is torch.float32"),
        (torch.zeros(2, 32, dtype=torch.bfloat16), "x: in is 32, elsewhere 64"),
        (torch.zeros(64, dtype=torch.bfloat16), r"x: shape \[64\]"),
        (torch.zeros(64, 2, dtype=torch.bfloat16).T, "x: last dimension has stride 2"),
        (torch.zeros(2, 64, dtype=torch.bfloat16, device="meta"), "x: device is meta"),
    ],
    ids=["dtype", "width", "vector", "stride", "device"],
)
def test_a_map_refuses_by_name(x, message):
    linear = open_linear(Library(), torch.zeros(16, 64, dtype=torch.bfloat16), None, None)
    with pytest.raises(InternalError, match=message):
        linear(x)


def test_a_bias_that_does_not_fit_is_refused_by_name(library):
    with pytest.raises(InternalError, match="bias: out is 7, elsewhere 8"):
        open_linear(library, torch.zeros(8, 32), torch.zeros(7), None)
