"""Quantised linear maps in Triton against float64 products of the weight that they mean."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.quantized import HALF_BYTES, QuantForm, QuantizedWeight, pack_int4, quantize
from tandem.errors import InternalError
from tests.kernels.devices import on_each_device

pytest.importorskip("triton")

from kernels.triton import quantized
from kernels.triton.operations import TritonOperations

OPERATIONS = TritonOperations()
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
"""The interpreter truncates to bfloat16, so twice a rounding."""


def make(form: QuantForm, num_outputs: int, num_inputs: int, group: int, dtype: torch.dtype, *, offsets: bool):
    generator = torch.Generator().manual_seed(num_inputs + group)
    codes = torch.randint(0, 256, (num_outputs, num_inputs), generator=generator)
    if form in HALF_BYTES:
        values = pack_int4((codes & 15).to(torch.uint8))
    elif form is QuantForm.INT8:
        values = (codes - 128).to(torch.int8)
    else:  # every finite value, subnormal ones too
        values = torch.where(codes & 127 == 127, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = (torch.rand(num_outputs, num_inputs // group, generator=generator) + 0.1) / 100
    if form is QuantForm.FP4 and group == 32:  # MXFP4
        scales = torch.exp2(torch.log2(scales).round())
    shifts = torch.randn(scales.shape, generator=generator) / 10 if offsets else None
    return QuantizedWeight(form, values, scales, shifts, dtype)


def assert_multiplies(weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor, of_size: float = 0.0) -> None:
    """Against float64; `of_size`: what may be off besides, as a part of the sum of the terms' magnitudes."""
    got = OPERATIONS.linear(weight, bias)(x)
    meant = weight.dequantize(torch.float64)
    want = x.double() @ meant.T + bias.double()
    size = x.double().abs() @ meant.abs().T
    assert got.dtype is x.dtype
    assert ((got.double() - want).abs() <= ROUNDING[x.dtype] * want.abs() + (of_size + 2**-17) * size).all()


def products():
    """Each form in each dtype, with one token and with several.

    Interpreted, which takes long, with one of the two, so that each form and each dtype meets both.
    """
    forms = [
        (QuantForm.INT8, 192, False),
        (QuantForm.INT8, 16, True),
        (QuantForm.INT4, 32, True),
        (QuantForm.INT4, 64, False),
        (QuantForm.FP8, 64, False),
        (QuantForm.FP4, 32, False),
        (QuantForm.FP4, 16, False),
    ]
    for place, (dtype, form) in enumerate(itertools.product(ROUNDING, forms)):
        for tokens in (1, 19) if torch.cuda.is_available() else ((1, 19)[place % 2],):
            yield *form, dtype, tokens


@on_each_device
@pytest.mark.parametrize(("form", "group", "offsets", "dtype", "tokens"), list(products()), ids=str)
def test_a_product_is_that_of_the_weight_that_is_meant(form, group, offsets, dtype, tokens, device):
    weight = make(form, 72, 192, group, dtype, offsets=offsets).to(torch.device(device))
    wide = torch.full((tokens, 200), torch.nan, dtype=dtype, device=device)
    x = wide[:, 4:196]
    x.copy_(torch.randn(tokens, 192, generator=torch.Generator().manual_seed(tokens)))
    bias = torch.randn(72, generator=torch.Generator().manual_seed(1)).to(dtype=dtype, device=device)
    assert OPERATIONS.keeps(weight)
    assert_multiplies(weight, x, bias)


@on_each_device
@pytest.mark.parametrize(
    ("form", "group", "fewest"),
    [
        (QuantForm.INT8, None, 512),
        (QuantForm.INT4, 32, 512),
        (QuantForm.INT4, 128, 1024),
        (QuantForm.INT4, None, 1024),
        (QuantForm.FP8, None, 512),
        (QuantForm.FP4, 32, 512),
    ],
)
@pytest.mark.parametrize("tokens", [2, 40, 129])
def test_inputs_that_programs_share_are_added_up(monkeypatch, form, group, fewest, device, tokens):
    """By the largest tile, and one token beyond it, just as many as it shares: all else takes the interpreter long."""
    cuts, splits = [], quantized._splits
    monkeypatch.setattr(quantized, "_splits", lambda *sizes: cuts.append(splits(*sizes)) or cuts[-1])
    inputs = fewest if tokens > 128 else 2048
    plain = make(form, 72, inputs, group or inputs, torch.bfloat16, offsets=form is QuantForm.INT4)
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens)).bfloat16().to(device)
    bias = torch.randn(72, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    assert_multiplies(plain.to(torch.device(device)), x, bias)
    assert [num_splits > 1 for num_splits, _ in cuts] == [True]


@on_each_device
@pytest.mark.parametrize(
    ("form", "group", "offsets"),
    [
        (QuantForm.INT8, 2112, False),
        (QuantForm.INT8, 16, True),
        (QuantForm.INT4, 32, True),
        (QuantForm.INT4, 64, False),
        (QuantForm.FP8, 64, False),
        (QuantForm.FP4, 32, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_prompts_multiply_the_weight_that_is_meant(form, group, offsets, dtype, device):
    weight = make(form, 24, 2112, group, dtype, offsets=offsets).to(torch.device(device))
    x = torch.randn(513, 2112, generator=torch.Generator().manual_seed(0)).to(dtype=dtype, device=device)
    bias = torch.randn(24, generator=torch.Generator().manual_seed(1)).to(dtype=dtype, device=device)
    assert_multiplies(weight, x, bias, ROUNDING[dtype])  # each element of the weight is rounded too


@on_each_device
def test_a_token_is_the_same_whatever_is_with_it_in_its_tile(device):
    weight = make(QuantForm.INT4, 72, 1024, 32, torch.bfloat16, offsets=True).to(torch.device(device))
    linear = OPERATIONS.linear(weight, None)
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    assert torch.equal(linear(x)[3:4], linear(x[3:4]))
    assert linear(x[:0]).shape == (0, 72)


@on_each_device
def test_a_symmetric_int4_weight_needs_no_offsets(device):
    plain = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).to(device)
    weight = quantize(plain, QuantForm.INT4)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).to(device)
    linear = OPERATIONS.linear(weight, None)
    assert linear.weight.offsets is None
    torch.testing.assert_close(linear(x), x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


def test_scales_that_are_powers_of_2_take_a_byte():
    """4.25 bits of a weight in all, as published."""
    weight = make(QuantForm.FP4, 4, 64, 32, torch.bfloat16, offsets=False)
    held = OPERATIONS.linear(weight, None).weight
    assert held.values.nbytes + held.scales.nbytes == 4 * 64 * 4.25 / 8


@on_each_device
def test_a_gated_map_is_silu_of_the_gates_times_the_ups(device):
    weight = make(QuantForm.INT8, 64, 64, 64, torch.float32, offsets=False).to(torch.device(device))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(device)
    gate, up = (x @ weight.dequantize().T).chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(OPERATIONS.gated_linear(weight, None)(x), want, rtol=1e-4, atol=1e-4)


def test_a_group_that_does_not_fit_a_tile_is_dequantised():
    weight = make(QuantForm.INT8, 16, 48, 8, torch.float32, offsets=False)
    assert not OPERATIONS.keeps(weight)
    x = torch.randn(2, 48)
    torch.testing.assert_close(OPERATIONS.linear(weight, None)(x), x @ weight.dequantize().T)


def test_another_width_or_dtype_is_refused_by_name():
    weight = make(QuantForm.INT8, 16, 64, 64, torch.float32, offsets=False)
    for x in (torch.randn(2, 32), torch.randn(2, 64).half()):
        with pytest.raises(InternalError, match=r"^x: "):
            OPERATIONS.linear(weight, None)(x)
