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


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size"),
)
_EXPERTS = {"moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 4}


def _shape(name: str, family: str, *sizes: int, **more: int) -> PeerShape:
    return PeerShape(name, family, dict(zip(_SIZES, sizes, strict=True)) | more)


PEER_SHAPES = {
    shape.name: shape
    for shape in (
        _shape("135m", "llama", 576, 1536, 30, 9, 3, 64, 49152),
        _shape("0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936),
        _shape("8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256),
        _shape("moe", "qwen3_moe", 768, 2048, 12, 12, 4, 64, 32768, **_EXPERTS),
        _shape("smoke", "llama", 128, 192, 2, 2, 1, 64, 512),
    )
}
"""By name, with `_SIZES`. `smoke` is no model to compare on: it only shows quickly that everything runs."""


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
