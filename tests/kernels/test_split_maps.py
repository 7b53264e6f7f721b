"""Products by segments: wide maps against float64, one call against the tree of several, quantised columns."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.group import tree_sum
from kernels.quantized import QuantForm, quantize
from kernels.reference_operations import ReferenceOperations
from kernels.split_maps import SegmentedLinear
from models.shard import segment_borders
from tandem.errors import InternalError
from tests.kernels.oracle import named
from tests.kernels.tiers import libraries

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def operations():
    return {tier: CpuOperations(library) for tier, library in libraries().items()}


def _normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [None, *QuantForm], ids=str)
def test_a_wide_product_is_not_rounded_to_its_inputs_dtype(operations, form, dtype):
    plain, bias = _normal(50, 192, dtype=dtype), _normal(50, dtype=dtype, seed=1)
    weight = plain if form is None else quantize(plain, form)
    values = plain.double() if form is None else weight.dequantize(torch.float64)
    for tokens in (0, 1, 17, 150):
        x = _normal(tokens, 192, dtype=dtype, seed=2)
        expected = x.double() @ values.T + bias.double()
        for name, each in {**operations, "reference": ReferenceOperations()}.items():
            out = each.wide_linear(weight if name != "reference" else values.to(dtype), bias)(x)
            assert out.dtype is torch.float32, name
            if name != "reference" or form is None:
                torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=1e-5, msg=named(name))


@pytest.mark.native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [None, *QuantForm], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_one_call_adds_segments_as_the_tree_of_several_calls_does(operations, count, form, dtype):
    borders = segment_borders(8 * 96, 32)[: count + 1]
    plain = _normal(70, 8 * 96, dtype=dtype)
    for tier, each in operations.items():
        weights = [plain[:, begin:end] for begin, end in pairwise(borders)]
        maps = [each.wide_linear(w if form is None else quantize(w, form), None) for w in weights]
        split = SegmentedLinear(tuple(maps), borders, each.segment_sum(maps, borders))
        for tokens in (0, 1, 33, 140):
            x = _normal(tokens, 8 * 96, dtype=dtype, seed=3)[:, : borders[-1]]
            assert split.added is not None
            assert torch.equal(split.total(x), tree_sum(split.sums(x))), tier


@pytest.mark.parametrize("form", list(QuantForm))
@pytest.mark.parametrize("groups", [1, 6])
def test_columns_of_a_quantised_weight_are_those_of_its_values(form, groups):
    made = quantize(_normal(5, 192), form)
    factors = torch.arange(1, groups + 1)
    scales, offsets = (None if each is None else each[:, :1] * factors for each in (made.scales, made.offsets))
    whole = replace(made, scales=scales, offsets=offsets)
    assert torch.equal(whole.columns(32, 96).dequantize(), whole.dequantize()[:, 32:96])
    if groups > 1:
        with pytest.raises(InternalError, match="cut groups of 32"):
            whole.columns(32, 66)
