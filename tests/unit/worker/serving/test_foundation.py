"""What a worker builds its engine on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.loading import EngineRole
from models.files.checkpoint import DEMO, resolve_model
from shell.config import PrefillConfig
from shell.rpc.process import StopSignal
from tandem.errors import CheckpointError
from tandem.types import Role
from worker.serving import app
from worker.serving.app import Foundation


class FakeEngine:
    """Knows whether it was closed."""

    closed = False

    def close(self) -> None:
        """As the engine's."""
        self.closed = True


async def test_a_worker_whose_tokenizer_changes_while_it_loads_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(resolve_model(DEMO), tmp_path / "model")
    base = Foundation.lay(Role.PREFILL, replace(PrefillConfig(), model=str(folder)), None)
    engine = FakeEngine()

    def load(*_: Any) -> FakeEngine:
        (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        return engine

    monkeypatch.setattr(app, "load_engine", load)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: changed while"):
        async with base.engine(EngineRole(), StopSignal()):
            pytest.fail("it would serve")
    assert engine.closed
