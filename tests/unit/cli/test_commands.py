"""Each command's own part: the command line, what it prints, its exit code."""

import argparse
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.command import COMMANDS
from cli.main import main
from cli.sampling import add_sampling_arguments, generate_options
from cli.status_view import view
from cli.terminal import open_console, print_whole, table
from models.files.checkpoint import DEMO, resolve_model
from tandem.client import ClusterStatus, SamplingOptions, WorkerStatus
from tandem.types import PoolCounts, Role, WorkerId, WorkerLoad
from tests.registering import INFO


def flags(*argv: str) -> Any:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    return generate_options(parser.parse_args(argv))


def worker(worker_id: str, role: Role, *, draining: bool = False, connected: bool = True) -> WorkerStatus:
    pool = PoolCounts(10, 4, 1, 1, 3, 1, 16, 7)
    info = replace(INFO, worker_id=WorkerId(worker_id), role=role)
    return WorkerStatus(info, WorkerLoad(1234, 2, 3, 99, pool, 5, draining), 0.26, connected)


def printed(*parts: Any) -> str:
    """What comes out of a pipe."""
    out = io.StringIO()
    print_whole(open_console(out), *parts)
    return out.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: tandem {command}")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_usage_of_a_command_is_short_and_its_options_stand_in_groups(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage, *parts = capsys.readouterr().out.split("\n\n")
    assert usage.count("\n") <= 1
    assert "options:" in {part.splitlines()[0] for part in parts}
    assert "VALUE" not in {word for part in parts for word in part.split()}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_option_of_any_command_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--cache", "x", "--arch", "90"] if command == "compile" else []
    with pytest.raises(SystemExit) as ended:
        main([command, *needed, "--no-such-option"])
    told = capsys.readouterr().err
    assert (ended.value.code, told.count("\n"), f"tandem {command}: error: --no-such-option" in told) == (2, 1, True)


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("tandem ")


@pytest.mark.parametrize("argv", ["--version", "--help", "sreve"])
def test_what_runs_no_command_imports_none_of_what_they_need(argv: str) -> None:
    colours = () if argv == "--help" else ("rich", "rich_argparse")
    heavy = ("asyncio", "grpc", "google.protobuf", "torch", "jinja2", "shell.config", *colours)
    code = f"import atexit, sys; atexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))\n"
    code += "from cli.main import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, argv], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_the_commands_of_the_help_are_those_that_are_declared() -> None:
    for name, command in COMMANDS.items():
        subparsers = argparse.ArgumentParser().add_subparsers()
        importlib.import_module(command.module).add_parser(subparsers)
        assert name in subparsers.choices


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["status", "--target", "nowhere"], "--target"),
        (["serve", "--kv-blocks", "0"], "--kv-blocks"),
        (["serve", "--prefill", "0"], "--prefill"),
        (["prefill", "--transport", "pigeon"], "--transport"),
        (["generate", "--token-ids", "1", "prompt"], "--token-ids"),
    ],
)
def test_a_bad_option_is_exit_code_two_and_named(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert named in error


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["generate", "--temperature", "hot"],
        ["generate", "--stop-token-ids", "a"],
        ["bench", "--rate", "0"],
        ["bench", "--rate", "1", "--concurrency", "1"],
        ["serve", "--kv-memry", "7"],
    ],
)
def test_what_argparse_refuses_is_one_line_and_exit_code_two(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.err.startswith("tandem: error: " if len(argv) < 2 else f"tandem {argv[0]}: error: ")
    assert (told.err.count("\n"), told.out) == (1, "")


def test_a_bad_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, told in (("BLOCKSIZE", "did you mean TANDEM_BLOCK_SIZE?"), ("XYZ", "`tandem COMMAND --help` lists")):
        with monkeypatch.context() as patch:
            patch.setenv(f"TANDEM_{name}", "16")
            assert main(["status"]) == 2
        assert f"TANDEM_{name}: no option of this name; {told}" in capsys.readouterr().err


def test_every_sampling_option_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    assert set(vars(parser.parse_args([]))) == set(SamplingOptions.__annotations__)


def test_flags_become_options_and_those_not_given_stay_unset() -> None:
    assert flags() == {}
    assert flags(
        *("--temperature", "0", "--stop", "a", "--stop", "b", "--stop-token-ids", "1,2"),
        *("--logit-bias", "4=-1.5", "--logit-bias", "5=2", "--no-skip-special-tokens"),
    ) == {
        "temperature": 0.0,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "logit_bias": {4: -1.5, 5: 2.0},
        "skip_special_tokens": False,
    }


def test_status_shows_every_worker_and_pool() -> None:
    workers = (worker("prefill-0", Role.PREFILL, draining=True), worker("decode-0", Role.DECODE, connected=False))
    text = printed(*view(ClusterStatus("demo", False, "no decode worker", 3, 400, 2, workers)))
    lines = text.splitlines()
    assert lines[0] == "model demo, not ready: no decode worker"
    assert "2 active, 3 queued (400 prompt tokens)" in lines[1]
    assert next(line for line in lines if line.startswith("decode-0")).split()[5:7] == ["not", "connected"]
    assert "draining" in next(line for line in lines if line.startswith("prefill-0"))
    assert ["prefill-0", "10", "4", "0", "1", "1", "3", "1", "16", "7"] in [line.split() for line in lines]


def test_status_says_why_a_worker_is_set_apart() -> None:
    odd = replace(worker("decode-1", Role.DECODE), set_apart="layout_fingerprint differs")
    lines = printed(*view(ClusterStatus("demo", True, "", 0, 0, 0, (odd,)))).splitlines()
    assert "decode-1 is set apart: layout_fingerprint differs" in lines
    assert any("decode-1" in line and "set apart" in line and "serving" not in line for line in lines[4:])


def test_status_without_workers_says_so() -> None:
    assert printed(*view(ClusterStatus("demo", False, "none", 0, 0, 0, ()))).splitlines()[-1] == "no workers"


def test_tables_align_words_left_and_numbers_right() -> None:
    assert printed(table(("name", "n"), [("a", 5), ("bcdef", 10)])).splitlines() == [
        "name    n",
        "a       5",
        "bcdef  10",
    ]


def test_doctor_says_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "reference" in output
    assert "shm" in output
    assert "cores usable" in output
    assert "quantised weights" in output
    assert "bfloat16, int8, float8_e4m3fn" in output


def test_doctor_works_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 0
    assert "needs torch" in capsys.readouterr().out


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_without_torch_is_exit_code_two_with_what_to_install(role: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, role, "--model", "demo", "--router", "127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "tandem: a worker: needs torch; install the extra `worker`\n"


@pytest.mark.parametrize(
    ("keys", "argv", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["--model-impl", "transformers"], "rope_type"),
        ({"model_type": "gemma", "sliding_window": 16}, [], "sliding_window: gemma has none"),
        ({"is_causal": False}, [], "is_causal: only causal"),
    ],
)
def test_what_workers_would_refuse_is_refused_before_they_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], argv: list[str], words: str
) -> None:
    folder = shutil.copytree(resolve_model(DEMO), tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    for command in ("serve", "doctor"):
        assert main([command, "--model", str(folder), *argv]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_serve_ends_with_the_reason_of_a_child_that_refuses_its_model(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model(DEMO), tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    command = [sys.executable, "-m", "cli.main", "serve", "--model", str(folder), "--listen", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.splitlines()[-1].startswith("tandem: router: ")
    assert "tokenizer.json" in ended.stderr.splitlines()[-1]


def test_output_to_a_reader_that_left_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        command = [sys.executable, "-m", "cli.main", "doctor"]
        ended = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
