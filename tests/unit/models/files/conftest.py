"""What is read from a checkpoint folder without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from models.files.checkpoint import CheckpointInfo, read_checkpoint


@pytest.fixture
def info(write_checkpoint: Callable[..., Path]) -> CheckpointInfo:
    """Vocabulary 100, context 64, end-of-text 2, no generation defaults."""
    return read_checkpoint(str(write_checkpoint()))
