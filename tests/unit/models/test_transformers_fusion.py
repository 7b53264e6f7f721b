"""Products of transformers' modules that are computed together give what they gave apart; others stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernels.operations import ActivatedLinear, PlainLinear
from models.transformers_fusion import fuse_products


def silu_mul(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Mlp(nn.Module):
    def __init__(self, act_fn, bias):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=bias), nn.Linear(8, 12, bias=bias)
        self.down_proj, self.act_fn = nn.Linear(12, 8, bias=bias), act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class HalvedMlp(Mlp):
    def forward(self, x):
        return super().forward(x) / 2


class Projections(nn.Module):
    def __init__(self, query_bias):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 16, bias=query_bias), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x), self.k_proj(2 * x)), dim=-1)


@pytest.mark.parametrize(
    ("part", "is_fused"),
    [
        (Mlp(nn.SiLU(), bias=False), True),
        (Mlp(nn.SiLU(), bias=True), True),
        (Mlp(nn.GELU(), bias=False), False),
        (HalvedMlp(nn.SiLU(), bias=False), False),
        (Projections(query_bias=True), True),
        (Projections(query_bias=False), False),
    ],
    ids=["mlp", "mlp-biased", "mlp-gelu", "mlp-of-its-own", "projections", "projections-mixed"],
)
@torch.no_grad()
def test_what_is_computed_together_gives_what_it_gave_apart(part, is_fused):
    x = torch.randn(1, 5, 8)
    expected, model = part(x), nn.Sequential(part)
    fuse_products(model, PlainLinear, lambda weight, bias: ActivatedLinear(PlainLinear(weight, bias), silu_mul))
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x + 1), part(x + 1) if is_fused else model(x + 1))
    assert is_fused is not any(type(module) is nn.Linear for module in model.modules())
