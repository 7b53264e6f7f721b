from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from shell.config import DecodeConfig, RouterConfig, ServeConfig, add_arguments, argv_of, load
from tandem.errors import ConfigError


def read(cls: type[Any], file: Path, *argv: str, **environ: str) -> Any:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_arguments(parser, cls)
    return load(cls, parser.parse_args(["--config", str(file), *argv]), environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tandem.yaml"


def test_a_file_comes_after_command_line_and_environment_and_before_defaults(file: Path) -> None:
    file.write_text("block-size: 32\nmax-seqs: 5\nchunk-tokens: 64  # a comment\n")
    config = read(DecodeConfig, file, "--block-size", "64", TANDEM_MAX_SEQS="7", TANDEM_BLOCK_SIZE="8")
    assert (config.block_size, config.max_seqs, config.chunk_tokens, config.kv_port) == (64, 7, 64, 0)


def test_values_are_taken_as_they_are_written(file: Path) -> None:
    file.write_text(
        "model: 007\nprefix-cache: false\nkv-memory: 2GiB\nrouter: [a:1, b:2]\nworker-id: off\nthreads: auto\n"
    )
    config = read(DecodeConfig, file)
    assert (config.model, config.prefix_cache, config.kv_memory) == ("007", False, 2 * 1024**3)
    assert (config.router, config.worker_id, config.threads) == (("a:1", "b:2"), "off", None)


def test_the_file_of_serve_is_read_by_serve_alone(file: Path) -> None:
    file.write_text("workers: 3\nmodel: m\nlisten: 127.0.0.1:7\n")
    config = read(ServeConfig, file)
    assert (config.num_workers, config.router.model, config.decode_worker.model) == (3, "m", "m")
    assert (config.router.listen, config.decode_worker.listen) == ("127.0.0.1:7", "127.0.0.1:0")
    assert "--config=none" in argv_of(config.router)
    assert "--config=none" in argv_of(config.decode_worker)


def test_an_empty_file_changes_nothing(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert read(RouterConfig, file) == RouterConfig(config_file=str(file))


def test_the_variable_names_a_file_too(file: Path) -> None:
    file.write_text("max-seqs: 5")
    parser = argparse.ArgumentParser()
    add_arguments(parser, DecodeConfig)
    assert load(DecodeConfig, parser.parse_args([]), {"TANDEM_CONFIG": str(file)}).max_seqs == 5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kv-memry: 1GiB", "--config: kv-memry: this command has no such option; did you mean kv-memory?"),
        ("kv_memory: 1GiB", "--config: kv_memory: this command has no such option; did you mean kv-memory?"),
        ("max-queued-tokens: 1", "--config: max-queued-tokens: this command has no such option"),
        ("config: other.yaml", "--config: config: this command has no such option"),
        ("overlap: true", "--config: overlap: removed: a chunk's blocks"),
        ("dtype: int3", "--config: dtype: must be one of auto"),
        ("prefix-cache: maybe", "--config: prefix-cache: "),
        ("block-size: [16, 32]", "--config: block-size: must be one value"),
        ("router: {a: 1}", "--config: router: must be one value, or a list of values"),
        ("- a\n- b", " is not a map of options"),
        ("a: [", "--config: cannot read "),
        ("\x00", "--config: cannot read "),
    ],
)
def test_what_is_wrong_in_a_file_is_told_in_one_line(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(DecodeConfig, file)
    assert told in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_that_is_not_there_is_told(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: cannot read .*No such file"):
        read(DecodeConfig, file)
