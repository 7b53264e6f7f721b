"""Models of the hub, served: `tandem serve --model hf://…` fetches once, for all its processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.cluster import serve
from models.files.checkpoint import resolve_model
from tandem.client import Client
from tests.fake_hub import fake_hub
from tests.finished_command import finished


def test_a_model_of_the_hub_is_fetched_once_and_served_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub({"me/demo": resolve_model("demo")}) as hub:
        for name, value in hub.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        with serve("hf://me/demo", "--prefill", "1", "--decode", "1") as served, Client(served.target) as client:
            assert client.model().model == "me/demo"
            (choice,) = client.complete("Once", max_tokens=4, temperature=0.0).choices
        assert choice.text
        assert len(hub.sent) == len(set(hub.sent))
        assert "model.safetensors" in hub.sent
        hub.sent.clear()
        told = finished("doctor", "--model", "hf://me/demo", HF_HUB_OFFLINE="1")
        assert (told.returncode, hub.sent) == (0, [])
        assert "me/demo" in told.stdout
