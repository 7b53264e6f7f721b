"""Quantised weights say what they mean, however they are stored, stacked or rounded."""

from __future__ import annotations

import pytest
import torch

from kernels.quantized import (
    HALF_BYTES,
    INT4_GROUP,
    QuantForm,
    QuantizedWeight,
    dequantized,
    pack_int4,
    quantize,
    stack,
    unpack_int4,
)
from tandem.errors import InternalError

ERRORS = {QuantForm.INT8: 0.009, QuantForm.FP8: 0.03, QuantForm.INT4: 0.09, QuantForm.FP4: 0.13}
"""Root mean square error that rounding normal weights may have."""


def make(form: QuantForm, num_outputs: int, num_inputs: int, group: int, *, offsets: bool, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    if form in HALF_BYTES:
        values = pack_int4(torch.randint(0, 16, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8))
    elif form is QuantForm.INT8:
        values = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    else:
        values = torch.randn(num_outputs, num_inputs, generator=generator).to(torch.float8_e4m3fn)
    shape = (num_outputs, num_inputs // group)
    scales = torch.rand(shape, generator=generator) + 0.1
    return QuantizedWeight(
        form, values, scales, torch.randn(shape, generator=generator) if offsets else None, torch.float32
    )


@pytest.mark.parametrize("form", list(QuantForm))
@pytest.mark.parametrize("offsets", [False, True])
def test_a_weight_is_scale_times_value_plus_offset(form, offsets):
    weight = make(form, 5, 96, 32, offsets=offsets)
    values = unpack_int4(weight.values) if form in HALF_BYTES else weight.values
    if form is QuantForm.FP4:
        magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
        values = torch.cat((magnitudes, -magnitudes))[values.long()]
    expected = torch.empty(5, 96, dtype=torch.float64)
    for output in range(5):
        for position in range(96):
            offset = 0.0 if weight.offsets is None else weight.offsets[output, position // 32].item()
            scale = weight.scales[output, position // 32].item()
            expected[output, position] = scale * float(values[output, position]) + offset
    assert torch.equal(weight.dequantize(torch.float64), expected)
    torch.testing.assert_close(weight.dequantize().double(), expected, atol=1e-5, rtol=1e-6)


def test_the_low_half_of_a_byte_comes_first():
    values = torch.arange(16, dtype=torch.uint8).view(1, 16)
    packed = pack_int4(values)
    assert packed[0, 0] == 0x10
    assert torch.equal(unpack_int4(packed), values)


@pytest.mark.parametrize("form", list(QuantForm))
def test_rounding_a_plain_weight_errs_little(form):
    plain = torch.randn(32, 512, generator=torch.Generator().manual_seed(1))
    weight = quantize(plain.to(torch.bfloat16), form)
    assert weight.dtype is torch.bfloat16
    assert weight.is_symmetric
    assert weight.group == (INT4_GROUP if form in HALF_BYTES else 512)
    assert (weight.dequantize(torch.float32) - plain).pow(2).mean().sqrt() < ERRORS[form]


@pytest.mark.parametrize("form", list(QuantForm))
def test_a_row_of_zeros_and_a_lone_weight_survive_rounding(form):
    plain = torch.zeros(3, 64)
    plain[1, 7], plain[2, 40] = 2.0, -3.0
    torch.testing.assert_close(quantize(plain, form).dequantize(), plain)


def test_int4_of_a_width_that_its_group_does_not_divide_takes_a_smaller_one():
    assert quantize(torch.randn(4, 72), QuantForm.INT4).group == 8


@pytest.mark.parametrize(
    "parts",
    [
        [(QuantForm.INT8, 64, False), (QuantForm.INT8, 64, False)],
        [(QuantForm.FP8, 64, False), (QuantForm.FP8, 64, False)],
        [(QuantForm.FP4, 32, False), (QuantForm.FP4, 32, False)],
        [(QuantForm.FP4, 32, False), (QuantForm.INT4, 64, True)],
        [(QuantForm.INT4, 32, True), (QuantForm.INT8, 16, False), (QuantForm.INT4, 64, False)],
    ],
)
def test_stacked_weights_keep_every_value(parts):
    weights = [
        make(form, 4 + 4 * index, 64, group, offsets=offsets) for index, (form, group, offsets) in enumerate(parts)
    ]
    stacked = stack(weights)
    assert stacked is not None
    expected = torch.cat([weight.dequantize(torch.float64) for weight in weights])
    assert torch.equal(stacked.dequantize(torch.float64), expected)


def test_float8_and_integers_do_not_stack():
    assert stack([make(form, 4, 64, 64, offsets=False) for form in (QuantForm.FP8, QuantForm.INT8)]) is None


def test_a_plain_weight_is_its_own_dequantised_one():
    plain = torch.randn(2, 4)
    assert dequantized(plain) is plain
    assert dequantized(quantize(plain.half(), QuantForm.INT8)).dtype is torch.float16


def test_tensors_that_do_not_fit_are_refused_by_name():
    good = make(QuantForm.INT8, 4, 64, 32, offsets=True)
    with pytest.raises(InternalError, match="scales"):
        QuantizedWeight(good.form, good.values, good.scales[:2], None, good.dtype)
    with pytest.raises(InternalError, match="offsets"):
        QuantizedWeight(good.form, good.values, good.scales, torch.ones(4, 3), good.dtype)
    with pytest.raises(InternalError, match="values"):
        QuantizedWeight(QuantForm.INT4, good.values, good.scales, None, good.dtype)
    with pytest.raises(InternalError, match=r"scales: \[4, 3\] do not divide 64 inputs"):
        QuantizedWeight(good.form, good.values, torch.ones(4, 3), None, good.dtype)
