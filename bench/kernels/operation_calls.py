"""Calls of the operations that are not attention, at a layer's real sizes, each with its cost.

Weights take turns as layers do, so that a CPU's cache does not hold what a model's next layer replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernels.product_peers import MakesLinear
from bench.kernels.roofline import (
    Cost,
    linear_cost,
    rms_norm_cost,
    rotate_and_store_cost,
    silu_mul_cost,
)
from bench.kernels.shapes import LayerShape
from bench.support.timing import Call
from kernels.operations import LinearMap, Operations, Rotation
from kernels.quantized import QuantForm, quantize

_EPS = 1e-5
_BLOCK_SIZE = 16
_TURNOVER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class OperationCalls:
    """One operation, ready to be timed."""

    name: str
    calls: list[Call]
    cost: Cost


def linear_calls(
    operations: MakesLinear, layer: LayerShape, tokens: int, dtype: torch.dtype, device: torch.device
) -> Iterator[OperationCalls]:
    """Every linear map of a layer and the output projection, each packed by `operations`."""
    for name, weights, cost in _linears(layer, tokens, dtype, device):
        yield OperationCalls(
            name, _calls([operations.linear(each, None) for each in weights], weights[0], tokens), cost
        )


def quantized_linear_calls(
    operations: Operations, layer: LayerShape, tokens: int, form: QuantForm, device: torch.device
) -> Iterator[OperationCalls]:
    """As `linear_calls` in bfloat16, of weights rounded to `form`; the cost counts values and scales."""
    for name, weights, cost in _linears(layer, tokens, torch.bfloat16, device):
        rounded = [quantize(each, form) for each in weights]
        calls = _calls([operations.linear(each, None) for each in rounded], weights[0], tokens)
        saved = weights[0].nbytes - rounded[0].values.nbytes - 2 * rounded[0].scales.numel()  # scales take two bytes
        yield OperationCalls(f"{name} {form}", calls, Cost(cost.num_bytes - saved, cost.flops, cost.dtype))


def _linears(
    layer: LayerShape, tokens: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, list[torch.Tensor], Cost]]:
    """Names, weights `[out, in]` that take turns, and costs."""
    for name, (in_features, out_features) in {**layer.linears, "lm_head": (layer.hidden, layer.vocab_size)}.items():
        weight_bytes = in_features * out_features * dtype.itemsize
        count = 1 if device.type == "cuda" else min(layer.num_layers, 1 + _TURNOVER_BYTES // weight_bytes)
        weights = [torch.randn(out_features, in_features, device=device).to(dtype) * 0.02 for _ in range(count)]
        yield name, weights, linear_cost(tokens, in_features, out_features, dtype)


def _calls(maps: list[LinearMap], weight: torch.Tensor, tokens: int) -> list[Call]:
    x = torch.randn(tokens, weight.shape[1], device=weight.device).to(weight.dtype)
    return [partial(each, x) for each in maps]


def small_calls(
    operations: Operations, layer: LayerShape, tokens: int, dtype: torch.dtype, device: torch.device
) -> Iterator[OperationCalls]:
    """Norms, rotation with store and gated activation over `tokens`."""

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(dtype) * 0.01  # small: a sum in place must not overflow

    x, residual, weight = randn(tokens, layer.hidden), randn(tokens, layer.hidden), randn(layer.hidden)
    plain: list[Call] = [partial(operations.rms_norm, x, weight, _EPS)]
    yield OperationCalls("rms_norm", plain, rms_norm_cost(tokens, layer.hidden, dtype, adds=False))
    added: list[Call] = [partial(operations.add_rms_norm, x, residual, weight, _EPS)]
    yield OperationCalls("add_rms_norm", added, rms_norm_cost(tokens, layer.hidden, dtype, adds=True))

    qkv = randn(tokens, layer.qkv_rows, layer.head_dim)
    angles = torch.randn(tokens, layer.head_dim // 2, device=device)
    num_blocks = -(-tokens // _BLOCK_SIZE)
    kv = torch.empty(num_blocks, 2, layer.num_kv_heads, _BLOCK_SIZE, layer.head_dim, dtype=dtype, device=device)
    slots = torch.randperm(num_blocks * _BLOCK_SIZE)[:tokens].to(device)
    rotation = Rotation(angles.cos(), angles.sin(), slots)
    rotate: list[Call] = [partial(operations.rotate_and_store, qkv, rotation, None, kv)]
    heads = layer.num_heads, layer.num_kv_heads
    yield OperationCalls("rotate_and_store", rotate, rotate_and_store_cost(tokens, heads, layer.head_dim, dtype))

    gate_up = randn(tokens, 2 * layer.intermediate)
    gated: list[Call] = [partial(operations.silu_mul, gate_up)]
    yield OperationCalls("silu_mul", gated, silu_mul_cost(tokens, layer.intermediate, dtype))
