"""The Triton operations against float64, interpreted on the CPU or compiled on a GPU.

A bound is one rounding of the dtype plus what float32 loses on the way.
"""

from __future__ import annotations

import pytest
import torch

from tandem.errors import InternalError
from tests.kernels import operations_oracle as oracle
from tests.kernels.devices import needs_gpu, on_each_device

pytest.importorskip("triton")

from kernels.triton.norm import MAX_WIDTH
from kernels.triton.operations import TritonOperations

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}
DTYPES = list(ROUNDING)
FLOAT32_LOSS = 2**-19
OPERATIONS = TritonOperations()
EPS = 1e-5


def normal(*shape, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def rows_of(tensor):
    """The same rows as a view into wider ones, with NaN between them."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 24), torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = wide[:, 8:-16]
    view.copy_(tensor)
    return wide, view


def assert_rounded(got, want, scale=None):
    """`got` is `want` (float64) within one rounding, and `FLOAT32_LOSS` of `scale` or of itself."""
    want = want.to(got.device)
    assert got.shape == want.shape
    # The interpreter truncates to bfloat16.
    rounding = ROUNDING[got.dtype] * (2 if got.dtype == torch.bfloat16 and not got.is_cuda else 1)
    bound = rounding * want.abs() + FLOAT32_LOSS * (want.abs() if scale is None else scale)
    if got.dtype == torch.float16:
        bound += 2**-24  # its smallest step
    beyond = ~((got.double() - want).abs() <= bound)  # NaN is beyond too
    assert not beyond.any(), f"{got[beyond][0]} is not {want[beyond][0]}"


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 8), (15, 576), (17, 1000), (2, MAX_WIDTH)])
def test_rms_norm_rounds_once(tokens, width, dtype, device):
    _, x = rows_of(normal(tokens, width, dtype=dtype, device=device))
    weight = normal(width, dtype=dtype, seed=1, device=device)
    got = OPERATIONS.rms_norm(x, weight, EPS)
    assert got.is_contiguous()
    assert_rounded(got, oracle.rms_norm(x, weight, EPS))


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 1000), (16, 8), (17, 576), (257, 8)])
def test_add_rms_norm_changes_the_residual_alone_and_norms_what_it_stored(tokens, width, dtype, device):
    _, x = rows_of(normal(tokens, width, dtype=dtype, device=device))
    wide, residual = rows_of(normal(tokens, width, dtype=dtype, seed=1, device=device))
    weight = normal(width, dtype=dtype, seed=2, device=device)
    before, summed = x.clone(), x.double() + residual.double()
    got = OPERATIONS.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(x, before)
    assert_rounded(residual, summed)
    assert_rounded(got, oracle.rms_norm(residual, weight, EPS))
    assert wide[:, :8].isnan().all()
    assert wide[:, -16:].isnan().all()


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_zeros_norms_to_zeros(dtype, device):
    zeros = torch.zeros(2, 64, dtype=dtype, device=device)
    assert torch.equal(OPERATIONS.rms_norm(zeros, torch.ones(64, dtype=dtype, device=device), EPS), zeros)


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 8), (15, 1000), (16, 1536), (97, 3)])
def test_silu_mul_rounds_once(tokens, width, dtype, device):
    _, gate_up = rows_of(normal(tokens, 2 * width, dtype=dtype, device=device) * 8)
    got = OPERATIONS.silu_mul(gate_up)
    assert got.is_contiguous()
    assert_rounded(got, oracle.gate_mul(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@on_each_device
def test_silu_of_far_gates_is_zero_or_the_gate(device):
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 2.0, 2.0, 2.0, 2.0, 2.0]], device=device)
    assert OPERATIONS.silu_mul(gate_up).tolist() == [[0.0, pytest.approx(0, abs=1e-40), 0.0, 200.0, 2e4]]


def check_rotation(case):
    truncated = case.qkv.dtype == torch.bfloat16 and not case.qkv.is_cuda
    case.check(OPERATIONS, oracle.TOLERANCES[case.qkv.dtype] * (2 if truncated else 1))


ROTATIONS = [  # tokens, (H, Hkv), D, S
    (0, (4, 2), 64, 16),
    (1, (9, 3), 64, 16),
    (15, (1, 1), 8, 1),
    (16, (2, 1), 80, 64),
    (17, (16, 1), 96, 16),
    (17, (28, 4), 128, 256),
    (5, (6, 3), 256, 16),
]


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", ROTATIONS, ids=str)
def test_rotation_rounds_once_and_stores_what_it_wrote_and_nothing_else(shape, normed, dtype, device):
    check_rotation(oracle.Rotation.make(*shape, dtype, normed=normed).to(device))


@on_each_device
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(("is_whole", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_norm_may_span_all_heads_and_have_wide_weights(dtype, is_whole, is_wide, device):
    case = oracle.Rotation.make(5, (4, 2), 64, 16, dtype, normed=True, is_whole=is_whole, is_wide=is_wide)
    check_rotation(case.to(device))


@on_each_device
def test_the_weight_of_a_norm_may_be_float32(device):
    x, weight = normal(17, 576, dtype=torch.bfloat16, device=device), normal(576, seed=1, device=device)
    assert_rounded(OPERATIONS.rms_norm(x, weight, EPS), oracle.rms_norm(x, weight, EPS))


@on_each_device
def test_rotation_of_a_long_batch(device):
    check_rotation(oracle.Rotation.make(257, (2, 2), 8, 16, torch.bfloat16, normed=True).to(device))


@on_each_device
def test_linear_is_the_weight_as_it_came(device):
    x, weight, bias = (normal(*shape, device=device) for shape in ((5, 8), (3, 8), (3,)))
    torch.testing.assert_close(OPERATIONS.linear(weight, bias)(x), x @ weight.T + bias)
    torch.testing.assert_close(OPERATIONS.linear(weight, None)(x), x @ weight.T)


def test_wrong_arguments_are_refused_by_name():
    x, weight = torch.zeros(3, 8), torch.ones(8)
    refusals = {
        "x: dtype is torch.float64": lambda: OPERATIONS.rms_norm(x.double(), weight.double(), EPS),
        "weight: dtype": lambda: OPERATIONS.rms_norm(x, weight.bfloat16(), EPS),
        "weight: E is 7": lambda: OPERATIONS.rms_norm(x, weight[:7], EPS),
        "x: last dimension has stride": lambda: OPERATIONS.rms_norm(torch.zeros(8, 3).T, weight, EPS),
        "x: E is 16385, at most": lambda: OPERATIONS.rms_norm(torch.zeros(1, 16385), torch.ones(16385), EPS),
        "residual: T is 2": lambda: OPERATIONS.add_rms_norm(x, x[:2], weight, EPS),
        "gate_up: 7 columns": lambda: OPERATIONS.silu_mul(x[:, :7]),
        "gate_up: shape": lambda: OPERATIONS.silu_mul(x[None]),
        "gate_up: dtype": lambda: OPERATIONS.silu_mul(x.double()),
    }
    for message, call in refusals.items():
        with pytest.raises(InternalError, match=f"^{message}"):
            call()


def test_rotation_refuses_float64_by_name():
    case = oracle.Rotation.make(3, (4, 2), 8, 16, torch.float64)
    with pytest.raises(InternalError, match=r"^qkv: dtype is torch.float64"):
        case.check(OPERATIONS, 0)


@needs_gpu
def test_a_graph_captures_every_operation():
    x, weight = normal(5, 64, dtype=torch.bfloat16, device="cuda"), torch.ones(64, dtype=torch.bfloat16, device="cuda")
    residual = x.clone()
    case = oracle.Rotation.make(5, (4, 2), 64, 16, torch.bfloat16, normed=True).to("cuda")
    rotation = case.rotation

    def work():
        OPERATIONS.rotate_and_store(case.qkv, rotation, case.qk_norm, case.kv_layer)
        normed = OPERATIONS.rms_norm(x, weight, EPS)
        return OPERATIONS.silu_mul(OPERATIONS.add_rms_norm(normed, residual, weight, EPS))

    original = case.qkv.clone()
    work()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    residual.copy_(x)
    case.qkv.copy_(original)
    graph.replay()
    replayed, rotated = got.clone(), case.qkv.clone()
    residual.copy_(x)
    case.qkv.copy_(original)
    assert torch.equal(replayed, work())
    assert torch.equal(rotated, case.qkv)
