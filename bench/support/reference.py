"""What the right answer is: transformers' own greedy `generate`, one prompt at a time, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from models.config import CONFIG_FILE
from models.config_json import ConfigJson
from models.files.language_part import CONTAINERS


def load_transformers(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint by transformers, from disk only, ready to run.

    Experts one by one: grouped products know no float64.
    """
    is_whole = ConfigJson.read(folder / CONFIG_FILE).text("model_type") in CONTAINERS
    auto: Any = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(
        folder, dtype=dtype, local_files_only=True, experts_implementation="eager"
    )
    model.train(mode=False)
    return model


class Reference:
    """The oracle of one checkpoint. End-of-text is ignored, and so are the checkpoint's sampling defaults."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_transformers(folder, torch.float32)  # generate is untyped
        make_config: Callable[..., Any] = GenerationConfig
        self._model.generation_config = make_config(do_sample=False)

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The `max_tokens` greedy tokens after `prompt`."""
        ids = torch.tensor([prompt])
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens)
        return [int(token_id) for token_id in out[0, len(prompt) :]]

    @torch.no_grad()
    def margin(self, token_ids: Sequence[int]) -> float:
        """How far the best next token's logit lies above the second best: tells a bug from a tie."""
        logits = self._model(torch.tensor([token_ids])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        return float(best - second)
