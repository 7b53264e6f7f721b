"""Small checkpoints of the families that transformers computes for us: one for each, with what its family is known for.

As `bench.support.tiny_models`. Windows are shorter than the prompts of the tests, routers have experts to choose from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.support.tiny_models import TinyModel
from models.transformers_families import FAMILIES

_MIXED_WINDOWS = {"sliding_window": 37, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
_GEMMA = {"query_pre_attn_scalar": 16} | _MIXED_WINDOWS
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "apertus": _PLAIN_ROPE,
    "cohere2": _MIXED_WINDOWS,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": _MIXED_WINDOWS,
    "gemma": {"head_dim": 16},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm": {"head_dim": 16, "eos_token_id": 319},
    "glm4": {"head_dim": 16, "eos_token_id": 319},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "granitemoe": _LOCAL_EXPERTS,
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
    },
    "ministral": {"head_dim": 16, "sliding_window": 29},
    "mixtral": _LOCAL_EXPERTS,
    "olmo3": _MIXED_WINDOWS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": _LOCAL_EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": _EXPERTS | {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "smollm3": {"num_hidden_layers": 4},
    "starcoder2": {"sliding_window": 37},
}

TINY_TRANSFORMERS = tuple(TinyModel(name, name, _OVERRIDES.get(name, {})) for name in sorted(FAMILIES))
