"""Fewer and larger products for models of transformers: q, k and v as one map, gated MLPs as two.

A module is only replaced where ours equals it on random rows; what is not recognised stays as it is.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from kernels.operations import LinearMap
from models.transformers_parts import Pack, Replacement

_ATTENTION = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_ACTIVATION = "act_fn"


class Stack:
    """One map in the place of several with the same input; computed for the first that is asked, kept for the last."""

    def __init__(self, linear: LinearMap, sizes: list[int]) -> None:
        self.linear = linear
        self.sizes = sizes
        self._given: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What the `index`-th map makes of x `[…, in]`. In order, and of the same tensor, they cost one product."""
        if self._given is not x:
            rows = self.linear(x.reshape(-1, x.shape[-1]))
            self._given, self._parts = x, torch.split_with_sizes(rows.view(*x.shape[:-1], -1), self.sizes, dim=-1)
        part = self._parts[index]
        if index == len(self.sizes) - 1:
            self._given, self._parts = None, ()
        return part


class StackPart(Replacement):
    """In the place of one of several linear maps that a `Stack` holds."""

    def __init__(self, stack: Stack, index: int) -> None:
        super().__init__()
        self.stack = stack
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X `[…, in]` → `[…, out of this part]`."""
        return self.stack.part(self.index, x)


class _GatedMlp(Replacement):
    """`down(silu(gate(x)) * up(x))` as two products."""

    def __init__(self, gate_up: LinearMap, down: LinearMap) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(x.reshape(-1, x.shape[-1]))).view(x.shape)


def fuse_products(model: nn.Module, pack: Pack, pack_gated: Pack) -> None:
    """Replaces what it knows in `model`, whose maps are still torch's. `pack_gated`: as `Operations.gated_linear`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            mlp = _gated_mlp(child, pack, pack_gated)
            if mlp is not None:
                setattr(module, name, mlp)
        projections = _linears(module, _ATTENTION)
        if projections is not None:
            stack = Stack(pack(*_stacked(projections)), [each.out_features for each in projections])
            for index, name in enumerate(_ATTENTION):
                setattr(module, name, StackPart(stack, index))


def _linears(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear] | None:
    """Children of these names, if they are plain linear maps, alike in having a bias."""
    found = [child for name in names if type(child := getattr(module, name, None)) is nn.Linear]
    is_alike = len({each.bias is None for each in found}) == 1
    return found if len(found) == len(names) and is_alike else None


def _stacked(linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    biases = tuple(each.bias for each in linears if each.bias is not None)
    return torch.cat(tuple(each.weight for each in linears)), torch.cat(biases) if biases else None


def _gated_mlp(module: nn.Module, pack: Pack, pack_gated: Pack) -> _GatedMlp | None:
    linears, activation = _linears(module, _GATED), getattr(module, _ACTIVATION, None)
    if linears is None or activation is None or {name for name, _ in module.named_children()} - {*_GATED, _ACTIVATION}:
        return None
    weight = linears[0].weight
    draws = torch.Generator(weight.device).manual_seed(0)
    gates = torch.randn(64, device=weight.device, generator=draws)
    if not torch.allclose(activation(gates), F.silu(gates)):
        return None
    rows = torch.randn((3, weight.shape[1]), device=weight.device, generator=draws).to(weight.dtype)
    gate, up, down = linears
    theirs, ours = module(rows), down(F.silu(gate(rows)) * up(rows))
    if not torch.allclose(ours, theirs, rtol=0, atol=0.01 * float(theirs.abs().max())):
        return None
    return _GatedMlp(pack_gated(*_stacked([gate, up])), pack(down.weight, down.bias))
