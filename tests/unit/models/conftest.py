"""Tiny checkpoints, saved once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.support.tiny_models import TinyModel, save_tiny_model

torch.set_num_threads(1)  # tensors are tiny: a second thread only spins, and others test here too


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyModel], Path]:
    """Saves a tiny model once per session."""
    saved: dict[str, Path] = {}

    def save(tiny: TinyModel) -> Path:
        key = repr(tiny)  # not the name: the lists of both back-ends use the same names for other shapes
        if key not in saved:
            saved[key] = save_tiny_model(tiny, tmp_path_factory.mktemp(tiny.name))
        return saved[key]

    return save
