"""Files that are read again when they change, and only then."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.security.watched import Watched
from tests.pki import replace_file


class Reader:
    """Reads a number from a file; counts how often."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_reads = 0
        self.out_of_descriptors = False

    def __call__(self) -> int:
        self.num_reads += 1
        try:
            if self.out_of_descriptors:
                raise OSError(errno.EMFILE, "Too many open files")
            return int(self.path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError("--file", "holds no number") from error


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    path = tmp_path / "number"
    path.write_text("1")
    return Reader(path)


@pytest.fixture
def watched(reader: Reader) -> Watched[int]:
    return Watched("a number", (str(reader.path),), reader)


def test_a_file_is_read_once_as_long_as_it_stays(watched: Watched[int], reader: Reader) -> None:
    assert [watched.get() for _ in range(3)] == [1, 1, 1]
    assert reader.num_reads == 1


def test_a_file_that_changed_is_read_again(watched: Watched[int], reader: Reader) -> None:
    replace_file(str(reader.path), b"2")

    assert watched.get() == 2


def test_a_link_that_points_elsewhere_counts_as_a_change(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("1")
    (tmp_path / "new").write_text("2")
    link = tmp_path / "link"
    link.symlink_to("old")
    watched = Watched("a number", (str(link),), Reader(link))
    moved = tmp_path / "moved"
    moved.symlink_to("new")
    moved.rename(link)  # as Kubernetes does with what it mounts

    assert watched.get() == 2


def test_a_broken_file_leaves_the_old_value_and_is_warned_of_once(
    watched: Watched[int], reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    replace_file(str(reader.path), b"no number")

    assert [watched.get() for _ in range(3)] == [1, 1, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].fields == {"what": "a number", "why": "--file: holds no number"}  # type: ignore[attr-defined]
    assert reader.num_reads == 2


def test_a_read_that_failed_is_tried_again_though_the_file_stays_as_it_is(
    watched: Watched[int], reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    replace_file(str(reader.path), b"2")
    reader.out_of_descriptors = True
    assert [watched.get() for _ in range(3)] == [1, 1, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]

    reader.out_of_descriptors = False

    assert watched.get() == 2


def test_a_file_that_is_mended_takes_effect(watched: Watched[int], reader: Reader) -> None:
    reader.path.unlink()
    assert watched.get() == 1
    reader.path.write_text("3")

    assert watched.get() == 3


def test_files_that_change_while_they_are_read_are_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    contents = iter([b"3"])

    def read() -> int:
        value = int(path.read_text())
        if value == 2:  # the file's other half comes only now
            replace_file(str(path), next(contents))
        return value

    watched = Watched("a number", (str(path),), read)
    replace_file(str(path), b"2")

    assert watched.get() == 1
    assert watched.get() == 3


def test_what_is_no_good_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Watched("a number", (str(tmp_path / "none"),), Reader(tmp_path / "none"))
