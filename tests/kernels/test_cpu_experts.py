"""A mixture of experts in one native call: what router and maps one by one give, of every form and tier."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import Library
from kernels.cpu.operations import CpuOperations
from kernels.operations import PlainLinear, Routing
from kernels.quantized import QuantForm, quantize
from models.experts import RoutedExperts, Router, SeparateExperts, SharedExpert
from models.layers import GatedMlp
from tandem.errors import InternalError
from tests.kernels.oracle import named
from tests.kernels.tiers import TIERS

pytestmark = pytest.mark.native
NUM_EXPERTS, HIDDEN, INNER = 7, 96, 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def both(dtype, tier=None, form=None, routing=Routing(3, adds_to_one=True), *, shared=0):  # noqa: B008 - a frozen value
    """The experts of one layer, one by one and as one operation; `shared`: inner size of one that every token has."""
    torch.manual_seed(0)
    operations = CpuOperations(Library(tier))

    def weight(*shape):
        plain = (torch.randn(shape) / 8).to(dtype)
        return plain if form is None else quantize(plain, form)

    router = operations.linear(torch.randn(NUM_EXPERTS, HIDDEN).to(dtype), None)
    mlps = tuple(
        GatedMlp(
            operations.gated_linear(weight(2 * INNER, HIDDEN), None),
            operations.linear(weight(HIDDEN, INNER), None),
            INNER,
        )
        for _ in range(NUM_EXPERTS)
    )
    separate = RoutedExperts(Router(router, routing), SeparateExperts(mlps))
    if not shared:
        maps = operations.experts(router, [(mlp.gate_up, mlp.down) for mlp in mlps], routing)
        assert maps is not None
        return separate, maps
    into = operations.gated_linear(weight(2 * shared, HIDDEN), None)
    always = SharedExpert(
        GatedMlp(into, operations.linear(weight(HIDDEN, shared), None), shared),
        operations.linear(torch.randn(1, HIDDEN).to(dtype), None),
    )
    mlps = (*mlps, always.mlp)
    maps = operations.experts(router, [(mlp.gate_up, mlp.down) for mlp in mlps], routing, always.gate)
    assert maps is not None
    return lambda x: separate(x) + always(x), maps


def tokens(count, dtype):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


def assert_close(fused, separate, x):
    bound = TOLERANCE[x.dtype]
    torch.testing.assert_close(fused(x), separate(x), atol=bound, rtol=bound, msg=named(f"{len(x)} tokens"))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_call_gives_what_separate_maps_do(dtype, tier):
    separate, fused = both(dtype, tier)
    for num_tokens in (0, 1, 3, 40, 700):
        assert_close(fused, separate, tokens(num_tokens, dtype))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shared", [INNER // 2, INNER, 3 * INNER])
def test_an_expert_that_every_token_has_is_one_more(dtype, tier, shared):
    separate, fused = both(dtype, tier, shared=shared)
    for num_tokens in (0, 1, 3, 700):
        assert_close(fused, separate, tokens(num_tokens, dtype))


@pytest.mark.parametrize("form", QuantForm)
def test_quantised_experts_too(form):
    separate, fused = both(torch.bfloat16, form=form)
    x = tokens(20, torch.bfloat16)
    torch.testing.assert_close(fused(x), separate(x), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("num_active", [1, NUM_EXPERTS])
def test_shares_need_not_add_to_one(num_active):
    separate, fused = both(torch.float32, routing=Routing(num_active, adds_to_one=False))
    x = tokens(9, torch.float32)
    torch.testing.assert_close(fused(x), separate(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shared", [0, 3 * INNER])
def test_a_token_gets_the_same_bits_in_any_company(tier, shared):
    _, fused = both(torch.bfloat16, tier, shared=shared)
    x = tokens(700, torch.bfloat16)
    together = fused(x)
    for first, last in ((0, 1), (3, 8), (100, 350), (699, 700)):
        assert torch.equal(fused(x[first:last]), together[first:last])


def test_a_token_of_nan_harms_no_other():
    _, fused = both(torch.bfloat16)
    x = tokens(5, torch.bfloat16)
    expected = fused(x)
    x[2] = torch.nan
    found = fused(x)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_maps_of_another_kind_are_not_fused():
    operations = CpuOperations(Library())
    plain = PlainLinear(torch.randn(NUM_EXPERTS, HIDDEN), None)
    assert operations.experts(plain, [(plain, plain)] * NUM_EXPERTS, Routing(2, adds_to_one=True)) is None


def test_sizes_that_do_not_fit_are_refused():
    operations = CpuOperations(Library())
    router, down = operations.linear(torch.randn(2, HIDDEN), None), operations.linear(torch.randn(HIDDEN, INNER), None)
    into = [operations.gated_linear(torch.randn(2 * width, HIDDEN), None) for width in (INNER, 2 * INNER)]
    with pytest.raises(InternalError, match="experts"):
        operations.experts(router, [(each, down) for each in into], Routing(1, adds_to_one=True))
    with pytest.raises(InternalError, match="experts"):
        operations.experts(router, [(into[0], down)] * 3, Routing(1, adds_to_one=True), router)
