"""Quantised experts as one grouped product: each row has the weight and bias of its own expert, in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.grouped import ExpertRows
from kernels.quantized import QuantForm, stack
from tests.kernels.devices import on_each_device

pytest.importorskip("triton")

from kernels.triton.grouped import GroupedLinear
from kernels.triton.operations import TritonOperations
from tests.kernels.test_triton_quantized import ROUNDING, make

OUTPUTS, INPUTS = 72, 192
FORMS = [
    (QuantForm.INT8, 192, False),
    (QuantForm.INT8, 16, True),
    (QuantForm.INT4, 32, True),
    (QuantForm.FP8, 64, False),
    (QuantForm.FP4, 32, False),
    (QuantForm.FP4, 16, False),
]


def check(form, group, counts, dtype, device, *, offsets=False):
    """Rows of each expert as `counts` has them; those of the first token are NaN, which no other may see."""
    generator = torch.Generator().manual_seed(sum(counts))
    one = make(form, OUTPUTS, INPUTS, group, dtype, offsets=offsets)
    experts = [one.rows(torch.arange(OUTPUTS).roll(shift)) for shift in range(len(counts))]
    bias = torch.randn(len(counts), OUTPUTS, generator=generator).to(dtype)
    whole = stack(experts)
    assert whole is not None
    grouped = TritonOperations().grouped_linear(whole.to(torch.device(device)), bias.to(device), len(counts))
    assert isinstance(grouped, GroupedLinear)
    assert not grouped.waits_for_device
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    x = torch.randn(len(ids), INPUTS, generator=generator).to(dtype)
    x[:1] = torch.nan
    got = grouped(x.to(device), ExpertRows.of(ids.to(device), len(counts))).cpu()
    assert got.dtype is dtype
    assert got[:1].isnan().all()
    for row in range(1, len(ids)):
        meant, wide = experts[ids[row]].dequantize(torch.float64), x[row].double()
        want, size = meant @ wide + bias[ids[row]].double(), meant.abs() @ wide.abs()
        assert ((got[row].double() - want).abs() <= ROUNDING[dtype] * want.abs() + 2**-17 * size).all(), row


@on_each_device
@pytest.mark.parametrize(("form", "group", "offsets"), FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_has_the_weight_of_its_own_expert(form, group, offsets, dtype, device):
    check(form, group, [3, 0, 9, 1, 0], dtype, device, offsets=offsets)


@on_each_device
@pytest.mark.parametrize(
    "counts",
    [
        [0, 1],  # one row
        [1],  # one expert
        [0, 0, 17],  # the first experts have none
        [70, 0, 40, 0],  # an expert has several tiles
        [129, 300, 0],  # the largest tile
        [1] * 33,  # no power of 2
    ],
    ids=str,
)
def test_rows_are_found_whatever_experts_have(counts, device):
    check(QuantForm.INT8, 192, counts, torch.bfloat16, device)


@on_each_device
def test_no_rows_give_none(device):
    whole = make(QuantForm.INT8, 2 * OUTPUTS, INPUTS, INPUTS, torch.float32, offsets=False).to(torch.device(device))
    grouped = TritonOperations().grouped_linear(whole, None, 2)
    rows = ExpertRows.of(torch.empty(0, dtype=torch.int64, device=device), 2)
    assert grouped(torch.empty(0, INPUTS, device=device), rows).shape == (0, OUTPUTS)


def test_a_group_that_the_kernel_does_not_take_is_dequantised_for_torch_in_bfloat16_alone():
    odd = make(QuantForm.INT8, 16, 48, 8, torch.float32, offsets=False)
    assert TritonOperations().grouped_linear(odd, None, 2) is None
