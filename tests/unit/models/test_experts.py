"""Experts: the two ways of computing them agree, and forms of weights go with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS
from kernels.grouped import PlainGrouped
from kernels.operations import Kernels, PlainLinear, Routing
from kernels.quantized import QuantForm
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from models.experts import GroupedExperts, MixtureOfExperts, RoutedExperts, Router, SeparateExperts
from models.layers import GatedMlp
from models.loading import load_model
from tests.paged_driver import load_tiny, logits_of

TINY = next(tiny for tiny in TINY_MODELS if tiny.name == "qwen3-moe")
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 5, 32, 24


@pytest.fixture
def weights():
    torch.manual_seed(0)
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return [[torch.randn(shape, dtype=torch.bfloat16) / 4 for shape in shapes] for _ in range(NUM_EXPERTS)]


def mixture(experts):
    scores = PlainLinear(torch.randn(NUM_EXPERTS, HIDDEN, dtype=torch.bfloat16), None)
    return MixtureOfExperts(RoutedExperts(Router(scores, Routing(2, adds_to_one=True)), experts))


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_grouped_products_give_what_separate_ones_do(weights, num_tokens):
    operations = ReferenceOperations()
    separate = SeparateExperts(
        tuple(
            GatedMlp(operations.gated_linear(torch.cat((gate, up)), None), operations.linear(down, None), INTERMEDIATE)
            for gate, up, down in weights
        )
    )
    into = torch.stack([torch.cat((gate, up)) for gate, up, _ in weights])
    out = torch.stack([down for _, _, down in weights])
    check_alike(grouped(into, out, operations), separate, num_tokens)


def test_grouped_products_have_the_bias_of_each_row_s_expert(weights):
    operations = ReferenceOperations()
    into = torch.stack([torch.cat((gate, up)) for gate, up, _ in weights])
    out = torch.stack([down for _, _, down in weights])
    biases = [torch.randn(each.shape[:2], dtype=torch.bfloat16) for each in (into, out)]
    separate = SeparateExperts(
        tuple(
            GatedMlp(
                operations.gated_linear(into[i], biases[0][i]), operations.linear(out[i], biases[1][i]), INTERMEDIATE
            )
            for i in range(NUM_EXPERTS)
        )
    )
    # Rounded once more than separate ones, before a bias is added.
    check_alike(grouped(into, out, operations, biases), separate, 9, tolerance=6e-2)


@pytest.mark.parametrize(("capability", "waits"), [((8, 0), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)])
def test_grouped_experts_wait_for_a_gpu_whose_products_torch_does_not_group(monkeypatch, capability, waits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    on_a_gpu = PlainGrouped(SimpleNamespace(device=torch.device("cuda", 0)), None)
    assert GroupedExperts(on_a_gpu, on_a_gpu, torch.relu, 1).waits_for_device is waits


def test_a_padding_row_that_is_no_number_has_experts_of_the_range_and_changes_no_other_row(weights):
    """Rows that fill up a captured step hold whatever was there."""
    operations = ReferenceOperations()
    into = torch.stack([torch.cat((gate, up)) for gate, up, _ in weights])
    mlp = mixture(grouped(into, torch.stack([down for _, _, down in weights]), operations))
    x = torch.randn(4, HIDDEN, dtype=torch.bfloat16)
    expected = mlp(x)[:2]
    x[2:] = torch.tensor([torch.nan, torch.inf], dtype=torch.bfloat16)[:, None]
    ids, _ = mlp.experts.router(x)
    assert ids.min() >= 0
    assert ids.max() < NUM_EXPERTS
    assert torch.equal(mlp(x)[:2], expected)


def grouped(into, out, operations, biases=(None, None)):
    return GroupedExperts(PlainGrouped(into, biases[0]), PlainGrouped(out, biases[1]), operations.silu_mul, NUM_EXPERTS)


def check_alike(grouped, separate, num_tokens, tolerance=2e-2):
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16)
    torch.manual_seed(1)
    expected = mixture(separate)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(mixture(grouped)(x), expected, atol=tolerance, rtol=2e-2)


def test_a_router_names_experts_in_ascending_order_with_their_own_shares():
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ids, shares = Router(PlainLinear(scores.T.contiguous(), None), Routing(2, adds_to_one=False))(torch.ones(1, 1))
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(shares, torch.softmax(scores, -1)[:, [1, 3]])


@pytest.mark.parametrize("tiny", [each for each in TINY_MODELS if each.name in {"qwen3-moe", "qwen2-moe", "gpt-oss"}])
def test_kernels_that_group_quantised_experts_leave_nothing_to_wait_for(checkpoint, tiny):
    triton = pytest.importorskip("kernels.triton.operations")
    kernels = Kernels(ReferenceBackend(), triton.TritonOperations())
    model = load_model(checkpoint(tiny), "float32", torch.device("cpu"), kernels, QuantForm.INT8)
    expected = load_tiny(checkpoint(tiny), "float32", QuantForm.INT8)
    assert (model.decoder.waits_for_device, expected.decoder.waits_for_device) == (False, True)
    torch.testing.assert_close(logits_of(model, 5), logits_of(expected, 5), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("form", QuantForm)
def test_rounded_experts_write_nearly_what_plain_ones_do(checkpoint, form):
    folder = checkpoint(TINY)
    plain, rounded = (logits_of(load_tiny(folder, "float32", each)) for each in (None, form))
    error = (rounded - plain).pow(2).mean().sqrt() / plain.std()
    assert 0 < error < {"int8": 0.1, "fp8": 0.3, "int4": 0.8, "fp4": 1.0}[form]
