"""The model of a soak: a copy of the demo model, whose weights an operator replaces by rename while workers serve it.

Two sets of weights, really different: most requests have another answer from each.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.files.checkpoint import DEMO, resolve_model

WEIGHTS = ("old weights", "new weights")
_FILE = "model.safetensors"
_NOISE = 0.3
"""Of the other weights, in standard deviations of each tensor: most greedy tokens differ."""


class SoakModel:
    """A folder that `--model` names, and the weights that lie in it now."""

    def __init__(self, root: Path) -> None:
        self.folder = root / DEMO
        self.weights = WEIGHTS[0]
        self._sets = {name: root / f"{place}.safetensors" for place, name in enumerate(WEIGHTS)}
        shutil.copytree(resolve_model(DEMO), self.folder)
        first, second = self._sets.values()
        shutil.copy(self.folder / _FILE, first)
        torch.manual_seed(0)
        save_file({name: _noisy(each) for name, each in load_file(first).items()}, second, {"format": "pt"})

    @classmethod
    @contextmanager
    def laid(cls) -> Iterator[SoakModel]:
        """In a temporary folder until the block ends."""
        with tempfile.TemporaryDirectory(prefix="tandem-soak-") as root:
            yield cls(Path(root))

    def put(self, weights: str) -> None:
        """Replaces the folder's weights by rename: who has read them keeps what it read."""
        coming = self.folder / f".{_FILE}"
        shutil.copy(self._sets[weights], coming)
        os.replace(coming, self.folder / _FILE)
        self.weights = weights

    def swap(self) -> None:
        """Puts the other weights."""
        self.put(next(each for each in WEIGHTS if each != self.weights))


def _noisy(weights: torch.Tensor) -> torch.Tensor:
    plain = weights.float()
    noise = _NOISE * plain.std() * torch.randn(plain.shape) if plain.dim() > 1 else torch.zeros(plain.shape)
    return (plain + noise).to(weights.dtype)
