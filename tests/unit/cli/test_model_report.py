"""`tandem doctor --model` says how a model is served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.support.tiny_models import TINY_MODELS, TinyModel, save_tiny_model
from cli.model_report import model_rows
from shell.config import DecodeConfig
from tandem.errors import CheckpointError, ConfigError

LONG_ROPE = next(tiny for tiny in TINY_MODELS if tiny.name == "phi3-longrope")


def rows(tiny: TinyModel, folder: Path, context_tokens: int | None) -> dict[str, str]:
    save_tiny_model(tiny, folder)
    return dict(model_rows(dataclasses.replace(DecodeConfig(), model=str(folder), context_tokens=context_tokens)))


def test_the_list_of_longrope_is_named(tmp_path: Path) -> None:
    overrides = {**LONG_ROPE.overrides, "original_max_position_embeddings": 128}
    tiny = TinyModel("phi3", "phi3", overrides)
    assert rows(tiny, tmp_path, None)["context"].startswith("4096 tokens; longrope with its factors for long texts")
    assert rows(tiny, tmp_path, 128)["context"].startswith("128 tokens; longrope with its factors for short texts")


def test_a_quantised_checkpoint_is_judged_as_its_loader_does(tmp_path: Path) -> None:
    save_tiny_model(TINY_MODELS[0], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 3}})
    )
    with pytest.raises(CheckpointError, match=r"quantization_config\.bits: 3 bits are not read"):
        model_rows(dataclasses.replace(DecodeConfig(), model=str(tmp_path)))


def test_a_context_longer_than_the_model_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--context-tokens: 5000 is above the model's 4096"):
        rows(TINY_MODELS[0], tmp_path, 5000)
