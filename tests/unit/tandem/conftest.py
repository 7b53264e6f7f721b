"""A checkpoint folder without weights, and what is read from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.files.checkpoint import CheckpointInfo, read_checkpoint

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2}

WriteCheckpoint = Callable[..., Path]


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> WriteCheckpoint:
    """Writes config.json (with changes) and generation_config.json (if given); returns the folder."""

    def write(config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / "tiny"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return write


@pytest.fixture
def info(write_checkpoint: WriteCheckpoint) -> CheckpointInfo:
    """Vocabulary 100, context 64, end-of-text 2, no generation defaults."""
    return read_checkpoint(str(write_checkpoint()))
