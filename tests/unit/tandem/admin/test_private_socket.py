"""The socket behind the front door: reachable from within, and by nobody else."""

from __future__ import annotations

import socket
import stat
import tempfile
from pathlib import Path

import pytest

from tandem.admin import private_socket
from tandem.admin.private_socket import PrivateSocket
from tandem.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def listen(private: PrivateSocket) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(private.bind_path)
    server.listen()
    return server


def test_nobody_else_may_enter_its_folder() -> None:
    with PrivateSocket() as private:
        assert stat.S_IMODE(Path(private.bind_path).parent.stat().st_mode) == 0o700


def test_a_sealed_socket_is_reached_but_lies_nowhere(folder: Path) -> None:
    with PrivateSocket() as private, listen(private) as server:
        private.seal()
        assert list(folder.iterdir()) == []
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(private.connect_path)
            server.accept()[0].close()


def test_nothing_leads_to_it_once_it_is_closed() -> None:
    with PrivateSocket() as private, listen(private):
        private.seal()
        path = private.connect_path
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(FileNotFoundError):
        client.connect(path)


def test_without_handles_on_paths_it_stays_in_its_folder_until_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.O_PATH")
    with PrivateSocket() as private, listen(private):
        private.seal()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(private.connect_path)
        assert len(list(folder.iterdir())) == 1
    assert list(folder.iterdir()) == []


def test_where_no_temporary_folder_is_writable_it_lives_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = folder / "shm"
    memory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    monkeypatch.setattr(private_socket, "_MEMORY", str(memory))
    with PrivateSocket() as private:
        assert Path(private.bind_path).parent.parent == memory


@pytest.fixture
def too_deep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder whose path leaves no room for a socket's."""
    deep = folder / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    return deep


def test_where_the_temporary_folder_lies_too_deep_it_lives_in_memory(
    folder: Path, too_deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_socket, "_MEMORY", str(folder))
    with PrivateSocket() as private, listen(private):
        assert Path(private.bind_path).parent.parent == folder
    assert list(too_deep.iterdir()) == []


def test_where_no_folder_will_do_the_variable_is_named(
    folder: Path, too_deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_socket, "_MEMORY", str(folder / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR: neither it nor"):
        PrivateSocket()
    assert list(too_deep.iterdir()) == []
