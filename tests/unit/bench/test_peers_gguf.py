"""What llama.cpp is given are the checkpoint's own bits under its own names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench.peers.contenders import CONTENDERS, Environments
from bench.peers.gguf_files import gguf_name, interleaved, read_tensors


def test_tensors_have_their_gguf_names() -> None:
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.layers.12.mlp.gate_proj.weight") == "blk.12.ffn_gate.weight"
    assert gguf_name("model.layers.0.self_attn.q_proj.bias") == "blk.0.attn_q.bias"
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.mlp.experts.weight")


def test_rows_that_rotate_together_lie_side_by_side() -> None:
    rows = np.arange(2 * 4)[:, None]  # 2 heads of 4 rows
    assert interleaved(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_tensors_are_read_bit_for_bit(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).bfloat16(), "b": torch.randn(5).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = dict(read_tensors(tmp_path / "model.safetensors"))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(found[name], tensor.view(torch.uint16).numpy())


def test_contenders_without_an_environment_are_named_with_the_reason() -> None:
    python = Path("python")
    assert Environments(python, python).absent() == {}
    assert Environments(vllm_python=python).absent() == {
        name: "no environment of llama given" for name, each in CONTENDERS.items() if each.program == "llama"
    }
    assert Environments().absent()["vllm"] == "no environment of vllm given"
