"""Models of the hub: huggingface_hub itself, against a hub on loopback. Its settings are read once by a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from models.files.checkpoint import read_checkpoint, resolve_model
from models.files.hub import hub_name
from tests.fake_hub import COMMIT, FakeHub, fake_hub

PROGRAM = """
import json, sys
from contextlib import contextmanager
import shell.progress
from models.files.hub import fetched
from tandem.errors import CheckpointError

@contextmanager
def display(what, total):
    done = []
    yield lambda: done.append(1)
    shown.append([what, total, len(done)])

shell.progress._display, shown = display, []
for model in json.loads(sys.argv[1]):
    shown.clear()
    try:
        told = fetched(model, weights=sys.argv[2] == "whole")
    except CheckpointError as error:
        told = error.message
    print(json.dumps([told, *shown]))
"""
TEXTS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("hub")
    whole = Path(shutil.copytree(resolve_model("demo"), folder / "whole"))
    for name in ("pytorch_model.bin", "modeling_own.py", "original/model.safetensors", "consolidated.safetensors"):
        (whole / name).parent.mkdir(exist_ok=True)
        (whole / name).write_bytes(b"never read")
    pickled, files = folder / "pickled", folder / "files"
    pickled.mkdir()
    shutil.copy(whole / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"never read")
    files.mkdir()
    (files / "tiny.Q8_0.gguf").write_bytes(b"G" * 2_500_000)
    refused = {"me/gated": (403, "GatedRepo")}
    with fake_hub({"me/whole": whole, "me/pickled": pickled, "me/files": files}, refused) as running:
        yield running


def fetch(environment: Mapping[str, str], *models: str, what: str = "whole") -> list[list[str]]:
    """For each, where it lies or why not, and the progress that was shown."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(models), what]
    given = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(command, env={**given, **environment}, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_model_is_fetched_without_pickles_and_code_and_called_by_its_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.sent.clear()
    ((whole, *_),) = fetch(hub.environment(tmp_path), "hf://me/whole")
    folder = Path(whole)
    assert {file.relative_to(folder).as_posix() for file in folder.rglob("*")} == TEXTS | {"model.safetensors"}
    assert sorted(hub.sent) == sorted(TEXTS | {"model.safetensors"})
    assert hub_name(folder) == "me/whole"
    info = read_checkpoint(whole)
    assert (info.name, info.config_fingerprint) == ("me/whole", read_checkpoint("demo").config_fingerprint)


def test_a_router_fetches_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    ((texts, *_),) = fetch(hub.environment(tmp_path), "hf://me/whole@v1", what="texts")
    assert {file.name for file in Path(texts).iterdir()} == TEXTS
    assert Path(texts).name == COMMIT


def test_one_gguf_file_is_fetched_alone_with_its_progress_by_the_megabyte(hub: FakeHub, tmp_path: Path) -> None:
    ((file, progress),) = fetch(hub.environment(tmp_path), "hf://me/files/tiny.Q8_0.gguf")
    assert Path(file).stat().st_size == 2_500_000
    assert progress == ["downloading me/files, MB", 2, 2]


def test_what_the_cache_has_is_served_without_a_network(hub: FakeHub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    ((whole, *_), (again, progress)) = fetch(environment, "hf://me/whole", "hf://me/whole")
    assert progress == ["downloading me/whole, MB", 0, 0]
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    unreachable = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert {whole, again} == {fetch(each, "hf://me/whole")[0][0] for each in (environment, offline, unreachable)}
    ((missing, *_),) = fetch(offline, "hf://me/files/tiny.Q8_0.gguf")
    assert "HF_HUB_OFFLINE forbids to fetch it: unset that" in missing
    ((silent, *_),) = fetch(unreachable, "hf://me/files/tiny.Q8_0.gguf")
    assert "http://127.0.0.1:9 does not answer" in silent


def test_what_cannot_be_fetched_is_said_in_one_line(hub: FakeHub, tmp_path: Path) -> None:
    told = {
        "hf://me": "write hf://OWNER/NAME",
        "hf://me/whole/modeling_own.py": "write hf://OWNER/NAME",
        "hf://me/files/*.gguf": "write hf://OWNER/NAME",
        "hf://me/nothing": "no such repository: check the name",
        "hf://me/gated": f"is gated: accept its terms at {hub.url}/me/gated",
        "hf://me/whole@v9": "no such revision: leave @REVISION out",
        "hf://me/pickled": "holds no safetensors, and nothing else is fetched",
        "hf://me/files": "holds no config.json: of GGUF files name one",
        "hf://me/files/other.gguf": f"no such file in the repository: look up its name at {hub.url}/me/files",
    }
    for model, (line, *_) in zip(told, fetch(hub.environment(tmp_path), *told), strict=True):
        assert line.startswith(f"{model}: ")
        assert told[model] in line
        assert "\n" not in line


def test_a_private_model_is_fetched_with_a_token_as_the_library_takes_it(tmp_path: Path) -> None:
    with fake_hub({"me/whole": resolve_model("demo")}, token="secret") as private:
        environment = private.environment(tmp_path)
        ((refused, *_),) = fetch(environment, "hf://me/whole", what="texts")
        assert "set HF_TOKEN" in refused
        (tmp_path / "token").write_text("secret")
        ((folder, *_),) = fetch(environment, "hf://me/whole", what="texts")
        assert Path(folder).name == COMMIT
