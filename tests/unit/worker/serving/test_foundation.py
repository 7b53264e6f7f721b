"""What a worker builds its engine on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.loading import EngineRole
from models.files.checkpoint import DEMO, resolve_model
from shell.config import DecodeConfig, ElasticConfig, PrefillConfig, WorkerConfig
from shell.rpc.process import StopSignal
from tandem.errors import CheckpointError, ConfigError
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


@pytest.mark.parametrize(
    ("role", "config", "is_served"),
    [
        (Role.PREFILL, PrefillConfig(), False),
        (Role.DECODE, DecodeConfig(), False),
        (Role.DECODE, DecodeConfig(local_prefill_tokens=None), True),
        (Role.ELASTIC, ElasticConfig(), True),
    ],
)
def test_workers_of_several_ranks_offer_no_transport_and_are_refused_where_they_need_one(
    role: Role, config: WorkerConfig, *, is_served: bool
) -> None:
    config = replace(config, tensor_parallel=2, device="cpu")
    if is_served:
        assert Foundation.lay(role, config, None).transports == ()
    else:
        with pytest.raises(ConfigError, match="--tensor-parallel: KV that several ranks hold is not handed over"):
            Foundation.lay(role, config, None)
