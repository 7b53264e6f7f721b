"""Checkpoints in the shapes that peers are compared on: random bfloat16 weights that every engine loads.

Written by transformers itself, with a tokenizer of one word per id, so that servers that must
turn tokens into text can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CONTEXT_TOKENS = 4096
_INITIALIZER_RANGE = 0.02


@dataclass(frozen=True, slots=True)
class PeerShape:
    """A family and its sizes."""

    name: str
    family: str
    sizes: Mapping[str, int]

    def config(self) -> Any:
        """The transformers config."""
        return AutoConfig.for_model(
            self.family,
            **self.sizes,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=True,
            initializer_range=_INITIALIZER_RANGE,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


PEER_SHAPES = {
    shape.name: shape
    for shape in (
        PeerShape(
            "135m",
            "llama",
            {
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "vocab_size": 49152,
            },
        ),
        PeerShape(
            "0.6b",
            "qwen3",
            {
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
            },
        ),
        PeerShape(
            "8b",
            "llama",
            {
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 128256,
            },
        ),
        PeerShape(
            "moe",
            "qwen3_moe",
            {
                "hidden_size": 768,
                "intermediate_size": 2048,
                "moe_intermediate_size": 384,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "head_dim": 64,
                "vocab_size": 32768,
            },
        ),
        PeerShape(
            "smoke",
            "llama",
            {
                "hidden_size": 128,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 64,
                "vocab_size": 512,
            },
        ),
    )
}
"""By name. `smoke` is no model to compare on: it only shows quickly that everything runs."""


def write_checkpoint(shape: PeerShape, folder: Path, seed: int = 0) -> None:
    """Fills `folder`, which exists, with config, weights and tokenizer."""
    torch.manual_seed(seed)
    from_config: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    from_config(shape.config(), dtype=torch.bfloat16).save_pretrained(folder)
    words = {f"t{index}": index for index in range(shape.sizes["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT_TOKENS, "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
