"""Products of quantised weights on the CPU against float64, at every tier that this machine runs."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.quantized import HALF_BYTES, QuantForm, QuantizedWeight, pack_int4
from tandem.errors import InternalError
from tests.kernels.operations_oracle import TOLERANCES, gate_mul
from tests.kernels.oracle import named
from tests.kernels.tiers import TIERS, libraries

pytestmark = pytest.mark.native

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_CASES = [
    # form, [out, in], group, has_offsets, scales exact in 16 bits
    (QuantForm.INT8, (1, 32), 32, False, False),
    (QuantForm.INT8, (33, 576), 576, False, False),
    (QuantForm.INT8, (50, 1536), 32, False, True),
    (QuantForm.INT8, (70, 96), 96, True, False),
    (QuantForm.INT8, (17, 80), 16, True, True),
    (QuantForm.INT4, (17, 64), 32, False, True),
    (QuantForm.INT4, (960, 576), 32, False, False),
    (QuantForm.INT4, (34, 1536), 128, True, True),
    (QuantForm.INT4, (8, 192), 64, True, False),
    (QuantForm.FP8, (33, 576), 576, False, False),
    (QuantForm.FP8, (70, 384), 128, False, True),
    (QuantForm.FP8, (2, 32), 32, True, False),
    (QuantForm.FP4, (33, 576), 32, False, True),
    (QuantForm.FP4, (70, 384), 128, False, False),
    (QuantForm.FP4, (18, 64), 64, True, False),
    (QuantForm.FP4, (17, 80), 16, False, True),
]
_IDS = [f"{form}-{'x'.join(map(str, shape))}-{group}" for form, shape, group, *_ in _CASES]


@pytest.fixture(scope="module")
def sets():
    return {tier: CpuOperations(library) for tier, library in libraries().items()}


@pytest.fixture(params=TIERS)
def operations(request, sets):
    return sets[request.param]


_LARGEST = {QuantForm.FP8: 100, QuantForm.INT8: 128, QuantForm.INT4: 8, QuantForm.FP4: 6}


def _values(form, shape, generator):
    """Of all sizes, `shape`, not packed."""
    if form is QuantForm.FP8:
        return (torch.randn(shape, generator=generator) * 60).to(torch.float8_e4m3fn)
    if form is QuantForm.INT8:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)


def _weight(form, shape, group, *, has_offsets, is_half, dtype, seed=0):
    """Every dequantised weight is about as large as 1 / sqrt(in)."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = shape
    values = _values(form, shape, generator)
    scales = (torch.rand(outputs, inputs // group, generator=generator) + 0.5) / _LARGEST[form] / inputs**0.5
    scales = scales.half().float() if is_half else scales
    offsets = -8 * scales if form is QuantForm.INT4 else None
    if has_offsets:
        offsets = (offsets if offsets is not None else 0) + torch.randn(scales.shape, generator=generator) * scales
    return QuantizedWeight(form, pack_int4(values) if form in HALF_BYTES else values, scales, offsets, dtype)


def _normal(*shape, dtype, seed=1):
    """`shape`, with a row stride of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator).to(dtype)[..., 1:-2]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(("form", "shape", "group", "has_offsets", "is_half"), _CASES, ids=_IDS)
def test_each_form_is_exact_for_any_number_of_tokens(sets, form, shape, group, has_offsets, is_half, dtype):
    weight = _weight(form, shape, group, has_offsets=has_offsets, is_half=is_half, dtype=dtype)
    wide = weight.dequantize(torch.float64)
    assert all(operations.keeps(weight) for operations in sets.values())
    for bias in (None, _normal(1, shape[0], dtype=dtype)[0]):
        linears = {tier: operations.linear(weight, bias) for tier, operations in sets.items()}
        for tokens in (0, 1, 2, 13, 70):
            x = _normal(tokens, shape[1], dtype=dtype)
            expected = x.double() @ wide.T + (0 if bias is None else bias.double())
            # Sums in float32; the result is rounded once.
            terms = x.double().abs() @ wide.abs().T
            bound = 2**-20 * terms + torch.finfo(dtype).eps * expected.abs()
            for tier, linear in linears.items():
                out = linear(x)
                assert out.dtype == dtype, tier
                assert ((out.double() - expected).abs() <= bound).all(), (tier, tokens)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_an_int4_value_counts_as_eight_larger_in_the_bound_of_the_error_where_nearly_all_are_zero(sets, dtype):
    values = torch.full((32, 64), 8, dtype=torch.uint8)
    values[:, 5] = torch.arange(32) % 16
    scales = torch.full((32, 2), 0.25)
    weight = QuantizedWeight(QuantForm.INT4, pack_int4(values), scales, -8 * scales, dtype)
    x = _normal(13, 64, dtype=dtype)
    terms = x.double().abs() @ (weight.dequantize(torch.float64).abs() + 8 * 0.25).T
    expected = x.double() @ weight.dequantize(torch.float64).T
    bound = 2**-20 * terms + torch.finfo(dtype).eps * expected.abs()
    for tier, operations in sets.items():
        errors = (operations.linear(weight, None)(x).double() - expected).abs()
        assert (errors <= bound).all(), tier


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(("form", "shape", "group", "has_offsets", "is_half"), _CASES[3::4], ids=_IDS[3::4])
def test_a_gated_map_is_exact_for_any_number_of_tokens(sets, form, shape, group, has_offsets, is_half, dtype):
    weight = _weight(form, (2 * shape[0], shape[1]), group, has_offsets=has_offsets, is_half=is_half, dtype=dtype)
    wide = weight.dequantize(torch.float64)
    bound = TOLERANCES[dtype]
    for bias in (None, _normal(1, 2 * shape[0], dtype=dtype)[0]):
        linears = {tier: operations.gated_linear(weight, bias) for tier, operations in sets.items()}
        for tokens in (0, 1, 33):
            x = _normal(tokens, shape[1], dtype=dtype)
            expected = gate_mul(x.double() @ wide.T + (0 if bias is None else bias.double()))
            for tier, linear in linears.items():
                torch.testing.assert_close(linear(x).double(), expected, atol=bound, rtol=bound, msg=named(tier))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", QuantForm)
def test_every_value_of_a_form_is_exact(sets, form, dtype):
    if form in HALF_BYTES:
        values = pack_int4(torch.arange(16, dtype=torch.uint8).repeat(32, 2))
    else:
        codes = torch.arange(256, dtype=torch.uint8)
        codes[torch.isnan(codes.view(torch.float8_e4m3fn).float())] = 0
        values = (codes if form is QuantForm.FP8 else torch.arange(256, dtype=torch.uint8)).repeat(32, 1)
        values = values.view(torch.float8_e4m3fn if form is QuantForm.FP8 else torch.int8)
    offsets = torch.full((32, 1), -8.0) if form is QuantForm.INT4 else None
    weight = QuantizedWeight(form, values, torch.ones(32, 1), offsets, dtype)
    x = torch.eye(weight.num_inputs, dtype=dtype)
    for tier, operations in sets.items():
        assert torch.equal(operations.linear(weight, None)(x), weight.dequantize(dtype).T), tier


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("form", "shape", "group", "has_offsets", "is_half"), _CASES[2::3], ids=_IDS[2::3])
def test_a_token_has_the_same_bits_in_any_batch_and_with_any_threads(
    sets, form, shape, group, has_offsets, is_half, is_gated, dtype
):
    shape = (2 * shape[0], shape[1])
    weight = _weight(form, shape, group, has_offsets=has_offsets, is_half=is_half, dtype=dtype)
    x = _normal(300, shape[1], dtype=dtype)
    linears = {
        tier: (operations.gated_linear if is_gated else operations.linear)(weight, None)
        for tier, operations in sets.items()
    }
    whole = {tier: linear(x) for tier, linear in linears.items()}
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for tier, linear in linears.items():
                for first, last in ((0, 1), (5, 6), (0, 16), (17, 50), (10, 110), (0, 300)):
                    assert torch.equal(linear(x[first:last]), whole[tier][first:last]), (tier, threads, first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("exponent", [0, -120])
@pytest.mark.parametrize("form", QuantForm)
def test_of_a_sum_that_is_zero_the_same_rounding_is_left_in_any_batch(sets, form, exponent):
    """All bits of the sums show then. Activations near the least numbers, whose products are smaller yet, too."""
    generator = torch.Generator().manual_seed(2)
    half, order = _values(form, (40, 288), generator), torch.randperm(288, generator=generator)
    turned = half.view(torch.uint8)[:, order].view(half.dtype)  # the torch of arm64 cannot index FP8
    values = torch.cat([half, turned], dim=1)
    scales = torch.full((40, 576 // 32), 2.0**-exponent)
    offsets = -8 * scales if form is QuantForm.INT4 else None
    values = pack_int4(values) if form in HALF_BYTES else values
    weight = QuantizedWeight(form, values, scales, offsets, torch.bfloat16)
    x = _normal(70, 288, dtype=torch.bfloat16) * 2.0 ** torch.randint(
        exponent - 9, exponent + 9, (70, 288), generator=generator
    )
    x = x.bfloat16()
    x = torch.cat([x, -x[:, order]], dim=1)
    for tier, operations in sets.items():
        linear = operations.linear(weight, None)
        whole = linear(x)
        assert whole.count_nonzero() > whole.numel() / 2, tier
        for first, last in [*((token, token + 1) for token in range(70)), (0, 2), (3, 19), (30, 62)]:
            assert torch.equal(linear(x[first:last]), whole[first:last]), (tier, first)


@pytest.mark.parametrize(
    ("form", "inputs", "group"), [(QuantForm.INT8, 40, 40), (QuantForm.INT4, 48, 16), (QuantForm.FP8, 48, 16)], ids=str
)
def test_a_weight_of_other_groups_is_multiplied_dequantised(operations, form, inputs, group):
    weight = _weight(form, (20, inputs), group, has_offsets=False, is_half=True, dtype=torch.bfloat16)
    assert not operations.keeps(weight)
    x = _normal(5, inputs, dtype=torch.bfloat16)
    assert torch.equal(operations.linear(weight, None)(x), operations.linear(weight.dequantize(), None)(x))


def test_what_does_not_fit_is_refused_by_name(operations):
    weight = _weight(QuantForm.INT8, (8, 32), 32, has_offsets=False, is_half=True, dtype=torch.bfloat16)
    with pytest.raises(InternalError, match="bias: out is 7, elsewhere 8"):
        operations.linear(weight, torch.zeros(7, dtype=torch.bfloat16))
    linear = operations.linear(weight, None)
    with pytest.raises(InternalError, match=r"x: dtype is torch.float32"):
        linear(torch.zeros(2, 32))
    with pytest.raises(InternalError, match="x: in is 64, elsewhere 32"):
        linear(torch.zeros(2, 64, dtype=torch.bfloat16))
    odd = _weight(QuantForm.INT8, (7, 32), 32, has_offsets=False, is_half=True, dtype=torch.bfloat16)
    with pytest.raises(InternalError, match="weight: 7 rows"):
        operations.gated_linear(odd, None)
