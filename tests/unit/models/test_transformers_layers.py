"""Whole layers of transformers' become ours where they compute the same bits; a layer that differs stays theirs."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama import modeling_llama

from bench.support.tiny_transformers import TINY_TRANSFORMERS
from kernels.dispatch import select_kernels
from models.loading import load_model
from models.transformers_layers import Layer

CPU = torch.device("cpu")
BY_NAME = {tiny.name: tiny for tiny in TINY_TRANSFORMERS}


def num_ours(folder, dtype="float32"):
    kernels = select_kernels("auto", CPU, getattr(torch, dtype))
    decoder = load_model(folder, dtype, CPU, kernels, None, "transformers").decoder
    return sum(isinstance(module, Layer) for module in decoder.base.modules())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma"])
def test_layers_with_the_same_bits_are_ours(checkpoint, name, dtype):
    assert num_ours(checkpoint(BY_NAME[name]), dtype) == BY_NAME[name].config().num_hidden_layers


@pytest.mark.parametrize("name", ["granite", "gemma2", "olmo2", "cohere", "glm"])
def test_layers_of_another_form_stay_theirs(checkpoint, name):
    assert num_ours(checkpoint(BY_NAME[name])) == 0


@pytest.mark.parametrize(("residual", "attended", "mlp"), [(2, 1, 1), (1, 0.5, 1), (1, 1, 0.5)])
def test_a_layer_of_known_parts_that_computes_otherwise_stays_theirs(checkpoint, monkeypatch, residual, attended, mlp):
    def forward(self, hidden_states, **given):
        normed = attended * self.input_layernorm(hidden_states)
        hidden_states = residual * hidden_states + self.self_attn(hidden_states=normed, **given)[0]
        return hidden_states + mlp * self.mlp(self.post_attention_layernorm(hidden_states))

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    assert num_ours(checkpoint(BY_NAME["llama"])) == 0
