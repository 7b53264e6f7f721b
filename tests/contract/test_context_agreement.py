"""Router and workers read the context's length from config.json each in their own way, to the same end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.config import load_model_config
from models.files.checkpoint import read_checkpoint

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}

_GEMMA3_KEYS = {"gemma3_text": {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 10000.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 48},
        {"rope_scaling": LLAMA3},
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "model_type": "gemma3_text",
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ],
)
def test_router_and_worker_agree_on_the_context(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | _GEMMA3_KEYS.get(str(changes.get("model_type")), {}) | changes)
    )

    assert read_checkpoint(str(tmp_path)).context_tokens == load_model_config(tmp_path).context_tokens
