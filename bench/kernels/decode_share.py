"""What a decode step is made of: linear maps, attention, small operations, sampling, and each one's share.

Each part is run as often as the step runs it, one call after the other, as a captured step would.
Inputs of small operations are then as warm as in a step; weights and KV are larger than the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.kernels.attention_batch import AttentionBatch
from bench.kernels.operation_calls import OperationCalls, linear_calls, small_calls
from bench.kernels.shapes import LayerShape, decode_shape
from bench.support.timing import Call
from kernels.operations import Kernels
from kernels.sampling import DrawParams

Timer = Callable[[Sequence[Call]], float]
"""Seconds of all calls one after the other."""


@dataclass(frozen=True, slots=True)
class StepShares:
    """Seconds of each part of one decode step."""

    model: str
    by: str
    batch: int
    context: int
    linear_s: float
    attention_s: float
    small_s: float
    """Norms, rotation with KV store, gated activation."""
    sampling_s: float

    @property
    def step_s(self) -> float:
        """All parts."""
        return self.linear_s + self.attention_s + self.small_s + self.sampling_s

    @property
    def small_share(self) -> float:
        """Of small operations and sampling."""
        return (self.small_s + self.sampling_s) / self.step_s

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {seconds * 1e3:.3f} ms ({seconds / self.step_s:.1%})"
            for name, seconds in (
                ("linear", self.linear_s),
                ("attention", self.attention_s),
                ("small operations", self.small_s),
                ("sampling", self.sampling_s),
            )
        )
        return f"{self.model} decode {self.batch} × {self.context} by {self.by}: {parts}; {self.step_s * 1e3:.2f} ms"


def measure_shares(
    kernels: Kernels, layer: LayerShape, batch: int, context: int, device: torch.device, timer: Timer, sampling: Call
) -> StepShares:
    """Bfloat16, `layer.num_layers` layers; `sampling` draws one token for each of `batch` rows of logits."""
    linears = {each.name: each for each in linear_calls(kernels.operations, layer, batch, torch.bfloat16, device)}
    head = linears.pop("lm_head")
    small = {each.name: each for each in small_calls(kernels.operations, layer, batch, torch.bfloat16, device)}
    per_layer = [small[name] for name in ("add_rms_norm", "rotate_and_store", "add_rms_norm", "silu_mul")]
    heads = layer.num_heads, layer.num_kv_heads, layer.head_dim
    attention = AttentionBatch(decode_shape(batch, context, heads), torch.bfloat16, device).calls(kernels.attention)
    return StepShares(
        model=layer.name,
        by=kernels.name,
        batch=batch,
        context=context,
        linear_s=timer([*_repeated(list(linears.values()), layer.num_layers), head.calls[0]]),
        attention_s=timer([attention[index % len(attention)] for index in range(layer.num_layers)]),
        small_s=timer([*_repeated(per_layer, layer.num_layers), small["add_rms_norm"].calls[0]]),
        sampling_s=timer([sampling]),
    )


def triton_sampling(rows: int, vocab_size: int, device: torch.device) -> Call:
    """Draws with temperature, top-k and top-p: all that a sampled step does."""
    from kernels.triton.sampling import TritonSampler  # needs triton

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    params = DrawParams(
        temperature=full(0.8, torch.float32),
        top_k=full(50, torch.int32),
        top_p=full(0.9, torch.float64),
        min_p=full(0.0, torch.float32),
        seed=full(1, torch.int64),
        output_index=full(0, torch.int64),
    )
    logits = torch.randn(rows, vocab_size, device=device) * 3
    return partial(TritonSampler().draw, logits, params)


def document(shares: StepShares) -> dict[str, Any]:
    """For the record."""
    return {
        **{name: getattr(shares, name) for name in ("model", "by", "batch", "context")},
        **{f"{name}_ms": getattr(shares, f"{name}_s") * 1e3 for name in ("linear", "attention", "small", "sampling")},
        "small_share": shares.small_share,
    }


def _repeated(operations: Sequence[OperationCalls], times: int) -> list[Call]:
    """Layer by layer; an operation's calls take turns over the layers."""
    return [each.calls[layer % len(each.calls)] for layer in range(times) for each in operations]
