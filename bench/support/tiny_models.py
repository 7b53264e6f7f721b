"""Small checkpoints with random weights, in every shape that the families come in.

Written by transformers itself, so that loading them tests the real file format. Logits are
spread widely (a large `initializer_range`), biases and norms are random too: a wrong position,
mask or bias changes greedy tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 320
CONTEXT_TOKENS = 4096
_INITIALIZER_RANGE = 0.25


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One shape: a family and what of its config differs from the common tiny one."""

    auto: ClassVar[Any] = AutoModelForCausalLM
    is_nested: ClassVar[bool] = False
    """Whether its text model is a part of it, which transformers then fills with small numbers."""
    name: str
    family: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        """The transformers config."""
        common: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT_TOKENS,
            "initializer_range": _INITIALIZER_RANGE,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        return AutoConfig.for_model(self.family, **(common | dict(self.overrides)))


_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + place / 10 for place in range(8)],
    "long_factor": [1.0 + place for place in range(8)],
}
"""Of heads of 16."""
_PARTIAL_LONG_ROPE = _LONG_ROPE | {
    "short_factor": [1.0 + place / 10 for place in range(6)],
    "long_factor": [1.0 + place for place in range(6)],
}
"""Of which 12 dimensions are rotated."""

TINY_MODELS = (
    TinyModel("llama", "llama"),
    TinyModel("llama-biased", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    TinyModel("llama-single-kv-head", "llama", {"num_key_value_heads": 1, "head_dim": 24}),
    TinyModel("mistral", "mistral", {"sliding_window": None, "head_dim": 32}),
    TinyModel("mistral-windowed", "mistral", {"sliding_window": 37, "num_key_value_heads": 4}),
    TinyModel("ministral", "ministral", {"sliding_window": 29, "head_dim": 24}),
    TinyModel(
        "ministral-mixed",
        "ministral",
        {
            "sliding_window": 45,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    TinyModel("qwen2", "qwen2", {"tie_word_embeddings": True}),
    TinyModel(
        "qwen2-windowed",
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
    ),
    TinyModel("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    TinyModel(
        "qwen3-biased",
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    TinyModel("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 41}),
    TinyModel(
        "qwen2-moe",
        "qwen2_moe",
        {
            "num_hidden_layers": 3,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    TinyModel(
        "qwen3-moe",
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    TinyModel(
        "gpt-oss",
        "gpt_oss",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "sliding_window": 37,
            "swiglu_limit": 2.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    TinyModel("gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 37}),
    TinyModel(
        "gemma2-caps",
        "gemma2",
        {
            "head_dim": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
            "num_hidden_layers": 3,
            "sliding_window": 50,
        },
    ),
    TinyModel(
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 29,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    TinyModel(
        "gemma3-scaled",
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 45,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
            "final_logit_softcapping": 12.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    TinyModel(
        "granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.5,
            "attention_bias": True,
        },
    ),
    TinyModel("olmo2", "olmo2", {"attention_bias": True}),
    TinyModel("olmo2-single-kv-head", "olmo2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    TinyModel(
        "olmo3",
        "olmo3",
        {
            "sliding_window": 37,
            "num_hidden_layers": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 512,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    TinyModel("glm", "glm", {"head_dim": 16, "eos_token_id": 319}),
    TinyModel("glm4", "glm4", {"head_dim": 24, "eos_token_id": 319, "partial_rotary_factor": 0.75}),
    TinyModel("phi3", "phi3"),
    TinyModel("phi3-partial", "phi3", {"partial_rotary_factor": 0.75}),
    # transformers takes the long factors for texts of more than one token, the short ones for none of this context.
    TinyModel(
        "phi3-longrope",
        "phi3",
        {"original_max_position_embeddings": 1, "rope_parameters": _LONG_ROPE | {"attention_factor": 1.2}},
    ),
    TinyModel(
        "phi3-partial-longrope",
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 1,
            "rope_parameters": _PARTIAL_LONG_ROPE | {"attention_factor": 1.2},
        },
    ),
    TinyModel(
        "phi3-longrope-short",
        "phi3",
        {"original_max_position_embeddings": CONTEXT_TOKENS, "rope_parameters": _LONG_ROPE},
    ),
    TinyModel("phi3-windowed", "phi3", {"sliding_window": 41, "tie_word_embeddings": True}),
    TinyModel("smollm3", "smollm3", {"num_hidden_layers": 5}),
    TinyModel(
        "smollm3-windowed",
        "smollm3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 33},
    ),
)


def build_tiny_model(tiny: TinyModel, seed: int = 0) -> PreTrainedModel:
    """The model in float32 by transformers, ready to generate."""
    torch.manual_seed(seed)
    from_config: Callable[..., PreTrainedModel] = tiny.auto.from_config
    model = from_config(tiny.config(), dtype=torch.float32)
    model.train(mode=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", "_proj_bias")):
                parameter.normal_(0.0, _INITIALIZER_RANGE)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".sinks"):
                parameter.normal_(1.0, 1.0)
            elif tiny.is_nested and parameter.ndim == 2:
                parameter.normal_(0.0, _INITIALIZER_RANGE)
    return model


def save_tiny_model(tiny: TinyModel, folder: Path, seed: int = 0, max_shard_size: str = "1GB") -> Path:
    """Writes the checkpoint, with a tokenizer of one word per id, into `folder`; returns it."""
    build_tiny_model(tiny, seed).save_pretrained(folder, max_shard_size=max_shard_size)
    _word_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB_SIZE)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
