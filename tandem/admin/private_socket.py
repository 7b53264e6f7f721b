"""A Unix socket that only its own process can reach: bound by a server, then taken off the file system.

    with PrivateSocket() as socket:
        server listens on socket.bind_path
        socket.seal()
        anyone in here connects to socket.connect_path

It is born in a folder that nobody else may enter. `seal` keeps a handle on it and removes socket and
folder: /proc/self/fd then still leads to it, and a killed process leaves nothing behind. Where the
system has no such handles the folder stays until the end.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Self

from tandem.errors import ConfigError

_MEMORY = "/dev/shm"
"""Writable where a container's root file system is not."""
_NAME = "s"
_MAX_PATH_BYTES = 107
"""Linux' `sun_path` without its last zero."""


class PrivateSocket:
    """Owns the folder and the handle. Use as a context manager."""

    def __init__(self) -> None:
        self._folder = Path(_new_folder())
        self._handle: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bind_path(self) -> str:
        """Where the server listens."""
        return str(self._folder / _NAME)

    @property
    def connect_path(self) -> str:
        """Where this process reaches it."""
        return self.bind_path if self._handle is None else f"/proc/self/fd/{self._handle}"

    def seal(self) -> None:
        """Takes the socket off the file system, where that is possible. The server must be listening."""
        if hasattr(os, "O_PATH") and Path("/proc/self/fd").is_dir():
            self._handle = os.open(self.bind_path, os.O_PATH | os.O_CLOEXEC)
            self._remove()

    def close(self) -> None:
        """Nobody can connect any more. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            Path(self.bind_path).unlink()
        with contextlib.suppress(FileNotFoundError):
            self._folder.rmdir()


def _new_folder() -> str:
    """Mode 0700, as mkdtemp makes them. Raises ConfigError if there is no place for one."""
    for parent in (None, _MEMORY):  # None = where the system has temporary files
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="tandem-", dir=parent)
            if len(os.fsencode(f"{folder}/{_NAME}")) <= _MAX_PATH_BYTES:
                return folder
            os.rmdir(folder)
    raise ConfigError(
        "TMPDIR", f"neither it nor {_MEMORY} is writable and short enough for the admin port's own socket"
    )
