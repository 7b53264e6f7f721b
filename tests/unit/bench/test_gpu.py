"""The orchestration of `make gpu`, with parts that need no GPU."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import gpu
from bench.gpu import Outcome, Part, parts, run_part, served_parts
from kvtransfer.transports import TRANSPORTS

GPU = {"gpu": "Test GPU", "driver": "1.2"}


def part(program: str, *, limit_s: float = 60.0, gives_json: bool = False) -> Part:
    return Part("fake", (sys.executable, "-c", program), limit_s, gives_json)


def test_a_part_that_gives_figures_gives_them_whole() -> None:
    outcome = run_part(part("print('{\"a\": [1, 2]}')", gives_json=True))
    assert (outcome.succeeded, outcome.result) == (True, {"a": [1, 2]})


def test_a_part_without_the_figures_that_it_should_give_has_failed() -> None:
    outcome = run_part(part("print('not measured: no GPU')", gives_json=True))
    assert not outcome.succeeded
    assert outcome.last_words == "no figures: not measured: no GPU"


def test_a_part_that_hangs_is_ended_with_all_its_children() -> None:
    child = f"import subprocess; subprocess.run(['{sys.executable}', '-c', 'import time; time.sleep(600)'])"
    outcome = run_part(part(child, limit_s=0.5))  # returns only once nobody holds the pipes any more
    assert not outcome.succeeded
    assert "0.5 s, its limit" in outcome.last_words


def test_all_parts_together_take_less_than_ten_minutes() -> None:
    all_parts = parts([transport.name for transport in TRANSPORTS])
    together_s = max(each.limit_s for each in all_parts if not each.is_timed)
    assert together_s + sum(each.limit_s for each in all_parts if each.is_timed) < 600


@pytest.mark.parametrize("is_there", [False, True])
def test_vllm_runs_the_loads_where_it_imports(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda _: object() if is_there else None)
    names = [each.name for each in served_parts("8b", "cuda")]
    assert names == ["served", *["vllm"] * is_there]


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_dry_run_serves_a_tiny_model_on_the_cpu_and_records_nothing(
    monkeypatch: pytest.MonkeyPatch, succeeded: bool
) -> None:
    commands: list[str] = []

    def run(wanted: list[Part]) -> list[Outcome]:
        commands.extend(" ".join(each.command[2:]) for each in wanted)
        return [Outcome(each.name, "", succeeded, 1.0, "") for each in wanted]

    monkeypatch.setattr(gpu, "find_spec", lambda _: None)
    monkeypatch.setattr(gpu, "run_parts", run)
    monkeypatch.delattr(gpu, "write_record")
    assert gpu.main(["--dry-run"]) == (0 if succeeded else 1)
    assert commands == ["bench.served --shape smoke --device cpu --no-prefix-cache"]


def test_everything_is_recorded_even_if_a_part_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = run_main(monkeypatch, lambda _: [part("raise SystemExit('broken')"), part("print('fine')")])
    assert [each["succeeded"] for each in recorded["parts"]] == [False, True]
    assert recorded["gpu"] == GPU
    assert [each["name"] for each in recorded["transports"]] == [transport.name for transport in TRANSPORTS]
    json.dumps(recorded)


def run_main(monkeypatch: pytest.MonkeyPatch, fakes: Callable[[list[str]], list[Part]]) -> dict[str, Any]:
    """What `main` records on a machine that says it has GPUs."""
    records: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu, "describe_gpu", lambda _: GPU)
    monkeypatch.setattr(gpu, "parts", fakes)
    monkeypatch.setattr(gpu, "write_record", records.__setitem__)
    assert gpu.main() == 1
    return records["gpu"]
