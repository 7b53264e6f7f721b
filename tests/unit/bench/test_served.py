"""When load on a server that was started for it counts as having gone well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from bench import served
from kernels.triton import COMPILED
from models.files.checkpoint import read_checkpoint

WELL = ["level=info event=serving\n"]


def served_by(monkeypatch: pytest.MonkeyPatch, lines: list[str], errors: dict[str, int]) -> list[tuple[str, ...]]:
    """Fakes of servers that log `lines`; returns the options of each that is started."""
    started: list[tuple[str, ...]] = []

    @contextmanager
    def serve(model: str, *options: str) -> Iterator[SimpleNamespace]:
        started.append((model, *options))
        yield SimpleNamespace(target="there", log=lines)

    figures = {"rates_per_s": 1, "errors": errors}
    monkeypatch.setattr(served, "serve", serve)
    monkeypatch.setattr(served, "Client", lambda _: nullcontext(SimpleNamespace(wait_ready=lambda _: None)))
    monkeypatch.setattr(served, "run_load", lambda *_: figures)
    return started


def test_each_server_is_measured_on_the_same_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = served_by(monkeypatch, WELL, {})
    assert served.main(["--device", "cpu"]) == 0
    assert started == [("demo", *roles, "--device", "cpu") for roles in served.SERVERS.values()]
    said = json.loads(capsys.readouterr().out)
    assert list(said["servers"]) == list(served.SERVERS)


@pytest.mark.parametrize(
    ("lines", "errors"),
    [(WELL, {"TIMEOUT": 1}), ([f'level=warning event="{COMPILED}" kernel=k\n'], {})],
    ids=["a request failed", "a kernel was compiled"],
)
def test_a_request_that_fails_or_waits_for_a_compiler_fails_the_bench(
    lines: list[str], errors: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    served_by(monkeypatch, lines, errors)
    with pytest.raises(RuntimeError):
        served.main([])


def test_random_weights_of_a_shape_are_served() -> None:
    with served.checkpoint("smoke") as folder:
        assert read_checkpoint(folder).vocab_size == 512
