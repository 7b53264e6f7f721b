"""FP8 by FP8: a long prompt's rows are rounded with a scale of their own; short steps, and other weights, are not."""

from __future__ import annotations

import pytest
import torch

from kernels.quantized import QuantForm, quantize
from tests.kernels.devices import HAS_GPU

pytest.importorskip("triton")

from kernels.triton.operations import TritonOperations
from kernels.triton.quantized import MULTIPLIED_PLAIN

CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if HAS_GPU else CPU
LONG = MULTIPLIED_PLAIN + 1


@pytest.fixture
def operations():
    rounding = TritonOperations().rounding(DEVICE)
    if rounding is None:
        pytest.skip("this GPU multiplies no FP8")
    return rounding


def rounded(x: torch.Tensor) -> torch.Tensor:
    steps = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / steps).to(torch.float8_e4m3fn).double() * steps.double()


def make(num_outputs=48, num_inputs=64, dtype=torch.bfloat16, form=QuantForm.FP8):
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(num_outputs, num_inputs, generator=generator).to(dtype), form).to(DEVICE)
    return weight, torch.randn(num_outputs, generator=generator).to(dtype).to(DEVICE)


def test_a_long_prompt_is_multiplied_as_its_rounded_rows_are(operations):
    weight, bias = make()
    x = torch.randn(LONG, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    x[:, :32] *= torch.logspace(-6, 6, LONG, 2.0, device=DEVICE)[:, None]
    got, plain = operations.linear(weight, bias)(x), TritonOperations().linear(weight, bias)(x)
    want = rounded(x) @ weight.dequantize(torch.float64).T + bias.double()
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-2)
    exact = x.double() @ weight.dequantize(torch.float64).T + bias.double()
    errors = [(each.double() - exact).pow(2).mean().sqrt() / exact.std() for each in (got, plain)]
    assert errors[1] < 0.005 < errors[0] < 0.04


def test_rows_of_zeros_and_padding_that_is_no_number_harm_no_other(operations):
    weight, bias = make()
    x = torch.randn(LONG, 64).bfloat16().to(DEVICE)
    linear = operations.linear(weight, bias)
    expected = linear(x)[2:]
    x[0], x[1] = 0, torch.nan
    got = linear(x)
    assert torch.equal(got[0], bias)
    assert torch.equal(got[2:], expected)


def test_short_steps_are_multiplied_as_they_are(operations):
    weight, bias = make()
    x = torch.randn(2, 64).bfloat16().to(DEVICE)
    assert torch.equal(operations.linear(weight, bias)(x), TritonOperations().linear(weight, bias)(x))


@pytest.mark.parametrize(
    "changes",
    [{"form": QuantForm.INT8}, {"num_outputs": 40}, {"num_inputs": 72}, {"dtype": torch.float32}],
    ids=str,
)
def test_other_weights_keep_their_activations(operations, changes):
    weight, bias = make(**changes)
    assert not operations.rounds(weight)
    assert type(operations.linear(weight, bias)) is type(TritonOperations().linear(weight, bias))


def test_without_the_option_nothing_is_rounded():
    assert not TritonOperations().rounds(make()[0])


def test_a_gpu_without_such_products_says_so(monkeypatch):
    monkeypatch.setattr("kernels.triton.operations.arch_of", lambda _: 80)
    assert TritonOperations().rounding(torch.device("cuda", 0)) is None
