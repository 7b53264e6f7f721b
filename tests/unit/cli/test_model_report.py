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


def test_what_each_rank_holds_is_told_and_a_number_that_cannot_share_the_model_is_refused(tmp_path: Path) -> None:
    save_tiny_model(TINY_MODELS[0], tmp_path)  # 2 K/V heads: each of 4 ranks holds one
    config = dataclasses.replace(DecodeConfig(), model=str(tmp_path), device="cpu", kv_blocks=1 << 16)
    alone, shared = (
        dict(model_rows(dataclasses.replace(config, tensor_parallel=size)))["pool of a decode worker"]
        for size in (2, 4)
    )
    assert (alone.split()[2], shared.split()[2]) == ("0.50", "1.00")
    ranks = dict(model_rows(dataclasses.replace(config, tensor_parallel=4)))["ranks of a worker"]
    assert ranks == "4, each with about 0.00 GiB of weights, 0.25 GiB of KV"
    with pytest.raises(ConfigError, match="--tensor-parallel: 8 ranks cannot share 4 heads evenly: give 1 or 2 or 4"):
        model_rows(dataclasses.replace(config, tensor_parallel=8))
