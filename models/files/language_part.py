"""The language part of a checkpoint that takes images too: its config and its tensors, as a text model has them.

Only of the kinds listed here, which put text at the positions that their language model would give it: where positions
have three parts (Qwen's), the three are equal for text, and rotation is the plain one. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TEXT_CONFIG = "text_config"
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "compression_config")
"""Keys that hold for the language part too, where it has none of its own."""
_LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_NOT_LANGUAGE = ("vision_tower.", "multi_modal_projector.", "visual.")


@dataclass(frozen=True, slots=True)
class Container:
    """A kind of checkpoint, by its `model_type`."""

    architecture: str
    """The only entry of `architectures` that is served."""
    absent: Mapping[str, Any]
    """What transformers 5.23 assumes where `text_config` is silent."""


_QWEN_ABSENT = {
    "model_type": "qwen2",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32768,
}
_TEXT_ABSENT: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
    },
}
"""What transformers 5.23 assumes where `text_config` of this family is silent, as that of LLaVA 1.5 is."""
CONTAINERS: Mapping[str, Container] = {
    "gemma3": Container(
        "Gemma3ForConditionalGeneration",
        {
            "model_type": "gemma3_text",
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
        },
    ),
    "llava": Container("LlavaForConditionalGeneration", {"model_type": "llama"}),
    "mistral3": Container("Mistral3ForConditionalGeneration", {"model_type": "mistral"}),
    "qwen2_vl": Container("Qwen2VLForConditionalGeneration", _QWEN_ABSENT),
    "qwen2_5_vl": Container("Qwen2_5_VLForConditionalGeneration", _QWEN_ABSENT),
}


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the language part, as a text model's would; `config` itself if it is a text model's."""
    container = CONTAINERS.get(str(config.get("model_type")))
    if container is None:
        return config
    nested = config.get(TEXT_CONFIG)
    inner = nested if isinstance(nested, Mapping) else {key: config[key] for key in config if key != "model_type"}
    family = str(inner.get("model_type", container.absent["model_type"]))
    absent = {**_TEXT_ABSENT.get(family, {}), **container.absent}
    language = {**absent, **{key: config[key] for key in _SHARED if key in config}, **inner}
    language.pop("architectures", None)
    language["model_type"] = _family(str(language["model_type"]))
    for key in ("rope_scaling", "rope_parameters"):
        rope = language.get(key)
        if isinstance(rope, Mapping) and "mrope_section" in rope:
            language[key] = _plain_rope(rope)
    tied = [each["tie_word_embeddings"] for each in (config, inner) if each.get("tie_word_embeddings") is not None]
    return language | ({"tie_word_embeddings": True in tied} if tied else {})


def language_tensor(name: str) -> str | None:
    """What a text model calls the tensor `name`; None if it is not of the language part."""
    if name.removeprefix("model.").startswith(_NOT_LANGUAGE):
        return None
    for theirs, ours in _LANGUAGE.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _family(text_family: str) -> str:
    """Qwen's language models differ from Qwen2 in nothing but the positions of images."""
    return "qwen2" if text_family.removesuffix("_text") in {"qwen2_vl", "qwen2_5_vl"} else text_family


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in rope.items() if key != "mrope_section"}
    return plain | {key: "default" for key in ("type", "rope_type") if plain.get(key) == "mrope"}
