"""Small checkpoints that take images too, one of each kind whose language part is served (see `tiny_models`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import AutoConfig, AutoModelForImageTextToText

from bench.support.tiny_models import TINY_MODELS, TinyModel

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
_QWEN_TEXT = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_TIED = {"tie_word_embeddings": True}
_TEXTS = {tiny.name: tiny for tiny in TINY_MODELS}


@dataclass(frozen=True, slots=True)
class TinyLanguagePart(TinyModel):
    """`family` is that of the whole checkpoint, `text` the shape of its language part, with `overrides`."""

    auto: ClassVar[Any] = AutoModelForImageTextToText
    is_nested: ClassVar[bool] = True
    text: str = "llama"
    vision: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the whole."""

    def config(self) -> Any:
        """The transformers config."""
        text = _TEXTS[self.text].config().to_dict() | dict(self.overrides)
        vision = dict(self.vision)
        return AutoConfig.for_model(self.family, text_config=text, vision_config=vision, **dict(self.whole))


TINY_LANGUAGE_PARTS = (
    TinyLanguagePart("gemma3-language", "gemma3", text="gemma3", vision=_VISION, whole={"mm_tokens_per_image": 4}),
    TinyLanguagePart("llava-language", "llava", text="llama", vision=_VISION),
    TinyLanguagePart("mistral3-language", "mistral3", text="mistral", vision=_VISION | {"head_dim": 16}),
    TinyLanguagePart(
        "qwen2-vl-language",
        "qwen2_vl",
        _QWEN_TEXT | {"model_type": "qwen2_vl_text"},
        text="qwen2",
        vision={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        whole=_TIED,
    ),
    TinyLanguagePart(
        "qwen2.5-vl-language",
        "qwen2_5_vl",
        _QWEN_TEXT | {"model_type": "qwen2_5_vl_text"},
        text="qwen2",
        vision=_QWEN_VISION,
        whole=_TIED,
    ),
)
