"""Files that must be the same whenever they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from models.files import checkpoint, read_files
from models.files.checkpoint import read_checkpoint
from models.files.read_files import ReadFiles
from tandem.errors import CheckpointError


def test_files_that_stay_pass_and_those_that_were_not_there_are_not_listed(tmp_path: Path) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.write_text("a")
    files = ReadFiles(there, missing)
    files.check()
    assert list(files) == [there]


def test_a_change_that_follows_at_once_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    files = ReadFiles(file)
    file.write_text("b")
    with pytest.raises(CheckpointError, match=r"file: changed while it was loaded: start again"):
        files.check()


def test_a_file_that_is_being_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    monkeypatch.setattr(read_files.time, "sleep", lambda _: file.write_text("longer"))
    with pytest.raises(CheckpointError, match="changed while"):
        ReadFiles(file)


def test_a_config_that_changes_between_reading_and_hashing_is_refused(
    write_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint()
    hash_files = checkpoint._fingerprint

    def replace_first(*given: object) -> str:
        (folder / "new").write_text((folder / "config.json").read_text().replace("64", "32"))
        (folder / "new").rename(folder / "config.json")
        return hash_files(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "_fingerprint", replace_first)
    with pytest.raises(CheckpointError, match=r"config\.json: changed while"):
        read_checkpoint(str(folder))


def test_a_tokenizer_that_changes_later_is_found_by_who_reads_it(write_checkpoint: Callable[..., Path]) -> None:
    folder = write_checkpoint()
    read = read_checkpoint(str(folder)).read
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: changed while"):
        read.check()
