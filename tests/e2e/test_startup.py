"""What cannot be served is refused at the start, in one line, with exit code 2; what is starting can be stopped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bench.support import cluster
from bench.support.cluster import eventually, run_command, serve
from models.files.checkpoint import resolve_model
from tandem.client import Client
from tandem.errors import Unavailable
from tests.finished_command import finished

ROOT = Path(__file__).parents[2]
LOADS_FOR_EVER = """
import sys, threading
from cli.main import main
import worker.serving.app as app
def load_engine(*_):
    print("loading", flush=True)
    threading.Event().wait()
app.load_engine = load_engine
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the demo checkpoint, to be broken."""
    return Path(shutil.copytree(resolve_model("demo"), tmp_path / "broken"))


def test_files_in_the_working_directory_are_not_taken_for_our_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("models", "router", "json", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user was run')")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(cluster, "open_command", partial(started_in, tmp_path))

    with serve("demo") as served, Client(served.target) as client:
        (choice,) = client.complete("Once", regex="[0-9]{3}", max_tokens=9).choices
    assert re.fullmatch("[0-9]{3}", choice.text)
    assert "a file of the user was run" not in "".join(served.log)


def started_in(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """As an installed `tandem` does, which has no working directory on its path."""
    command = [sys.executable, "-Pm", "cli.main", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, bufsize=1)


def test_a_corrupt_weights_file_is_named(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])

    done = finished("decode", "--model", str(checkpoint), "--router", "127.0.0.1:1")

    assert done.returncode == 2
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_that_cannot_start_ends_serve(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"no tensors here")

    done = finished("serve", "--model", str(checkpoint), "--listen", "127.0.0.1:0")

    assert done.returncode == 2
    assert "model.safetensors" in done.stderr


def test_an_unknown_architecture_is_named(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["model_type"], config["architectures"] = "mamba", ["MambaForCausalLM"]
    (checkpoint / "config.json").write_text(json.dumps(config))

    done = finished("prefill", "--model", str(checkpoint), "--router", "127.0.0.1:1")

    assert done.returncode == 2
    assert "mamba" in done.stderr.lower()


def test_workers_whose_block_layouts_differ_are_no_pair() -> None:
    """A router that only has an unequal pair says why it cannot serve."""
    with (
        run_command("router", "--model", "demo", "--listen", "127.0.0.1:0", "--patience-seconds", "0") as router,
        run_command("prefill", "--router", router.target, "--block-size", "16"),
        run_command("decode", "--router", router.target, "--block-size", "32"),
        Client(router.target) as unequal,
    ):
        assert eventually(lambda: [worker.connected for worker in unequal.status().workers] == [True] * 2, 30)
        status = unequal.status()
        assert not status.ready
        assert "layout" in status.not_ready_reason
        with pytest.raises(Unavailable, match="layout"):
            unequal.complete("Once", max_tokens=2)


@pytest.mark.parametrize("closed", [">&-", "<&- >&-"])
def test_a_process_without_standard_streams_serves_and_ends_in_order(closed: str) -> None:
    tandem = f'exec "{sys.executable}" -m cli.main router --model demo --listen 127.0.0.1:0 {closed}'
    with subprocess.Popen(["sh", "-c", tandem], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any("admin port" in line for line in process.stderr)
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["serve", "router --model demo", "decode --router 127.0.0.1:1"])
def test_too_few_open_files_are_named_with_the_remedy(command: str) -> None:
    tandem = f'ulimit -n 20; exec "{sys.executable}" -m cli.main {command} --listen 127.0.0.1:0'
    done = subprocess.run(["sh", "-c", tandem], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith("tandem: limit of open files: it is 20")
    assert "ulimit -n" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_worker_that_is_told_to_stop_does_not_load_to_the_end() -> None:
    """Of either role: they start alike."""
    command = [sys.executable, "-c", LOADS_FOR_EVER, "decode", "--model", "demo", "--router", "127.0.0.1:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "loading\n"
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
