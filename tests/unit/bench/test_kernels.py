"""The kernel benchmark compares what computes the same, and says what failed."""

import pytest
import torch

from bench.kernels import __main__ as bench_kernels
from bench.kernels.__main__ import Run
from bench.kernels.attention_batch import AttentionBatch, largest_difference
from bench.kernels.attention_peers import peer_calls
from bench.kernels.ceilings import Ceilings
from bench.kernels.operation_calls import linear_calls, quantized_linear_calls
from bench.kernels.roofline import Cost, attention_cost
from bench.kernels.shapes import LayerShape, chunk_shape, decode_shape, mixed_shape, prompt_shape
from bench.support import timing
from kernels.dispatch import select_kernels
from kernels.operations import Kernels
from kernels.quantized import QuantForm

CPU = torch.device("cpu")
HEADS = (4, 2, 16)
CEILINGS = Ceilings("cuda", 0, read_gb_s=1000.0, copy_gb_s=1000.0, bf16_tflop_s=100.0, f32_tflop_s=10.0)
LAYER = LayerShape("small", 32, 64, *HEADS, vocab_size=128, num_layers=3)


@pytest.fixture
def one_layer(monkeypatch):
    """No turnover of memory, no time spent: numbers are not looked at."""
    monkeypatch.setattr("bench.kernels.attention_batch._TURNOVER_BYTES", 1)
    monkeypatch.setattr("bench.kernels.operation_calls._TURNOVER_BYTES", 1)
    monkeypatch.setattr(bench_kernels, "_BUDGET_S", 0.0)
    monkeypatch.setattr(timing, "_MIN_RUNS", 1)


@pytest.mark.parametrize(
    "shape",
    [
        decode_shape(3, 37, HEADS),
        prompt_shape(2, 20, HEADS, block_size=1),
        chunk_shape(5, 21, HEADS),
        mixed_shape((3, 40, 17), HEADS, block_size=32),
    ],
    ids=str,
)
@pytest.mark.usefixtures("one_layer")
def test_peers_compute_the_same_batch(shape):
    batch = AttentionBatch(shape, torch.float32, CPU)
    own = batch.calls(select_kernels("reference", CPU, torch.float32).attention)[0]()
    for _, calls in peer_calls(batch):
        assert largest_difference(own, calls[0]()) < 1e-5


@pytest.mark.parametrize(("kv_dtype", "bound"), [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.1)])
@pytest.mark.usefixtures("one_layer")
def test_a_quantized_pool_holds_nearly_the_same_keys_and_values(kv_dtype, bound):
    shape, backend = decode_shape(3, 37, HEADS), select_kernels("reference", CPU, torch.float32).attention
    results = []
    for each in (None, kv_dtype):
        torch.manual_seed(0)
        results.append(AttentionBatch(shape, torch.float32, CPU, each).calls(backend)[0]())
    assert 0 < largest_difference(*results) < bound
    plain, quantized = shape.cost(torch.bfloat16), shape.quantized_cost(torch.bfloat16)
    assert plain.num_bytes - quantized.num_bytes == 2 * 2 * 3 * 37 * (2 * 16 - (16 + 4))


@pytest.mark.usefixtures("one_layer")
def test_costs_are_those_counted_by_hand():
    operations = select_kernels("reference", CPU, torch.bfloat16).operations
    plain = {each.name: each for each in linear_calls(operations, LAYER, 2, torch.bfloat16, CPU)}
    for each in quantized_linear_calls(operations, LAYER, 2, QuantForm.INT8, CPU):
        inputs, outputs = {**LAYER.linears, "lm_head": (32, 128)}[each.name.removesuffix(" int8")]
        same = plain[each.name.removesuffix(" int8")].cost
        assert same == Cost(2 * (inputs * outputs + 2 * (inputs + outputs)), 2 * 2 * inputs * outputs, torch.bfloat16)
        assert same.num_bytes - each.cost.num_bytes == outputs * (inputs - 2)
    cost = attention_cost([(3, 5)], (4, 2), 8, torch.float32)
    assert cost == Cost(4 * (2 * 3 * 4 * 8 + 2 * 2 * 8 * 5), 4 * 8 * 4 * (3 + 4 + 5), torch.float32)


class Broken:
    """An attention back-end that raises, or is wrong."""

    name = "broken"

    def __init__(self, raises):
        self.raises = raises

    def attend(self, q, k, v, kv_layer, metadata, params):
        if self.raises:
            raise RuntimeError("no such kernel")
        return torch.full(q.shape, 3.0, dtype=q.dtype)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.usefixtures("one_layer")
def test_a_kernel_that_fails_or_is_wrong_is_named_and_the_rest_is_measured(raises, monkeypatch, capsys):
    monkeypatch.setattr(bench_kernels, "CPU_ATTENTION", (decode_shape(1, 16, HEADS), decode_shape(2, 8, HEADS)))
    monkeypatch.setattr(bench_kernels, "_CPU_TOKENS", (1,))
    monkeypatch.setattr(bench_kernels, "SHAPE_135M", LAYER)
    monkeypatch.setattr(bench_kernels, "measure_ceilings", lambda device: CEILINGS)
    reference = select_kernels("reference", CPU, torch.bfloat16)
    run = Run(CPU)
    run.sets = {"broken": Kernels(Broken(raises), reference.operations)}
    record = run.measure()
    assert len(record["failures"]) == 2
    assert {row["kernel"] for row in record["measurements"]} >= {"qkv", "lm_head", "silu_mul"}
    assert "FAILED" in capsys.readouterr().err
