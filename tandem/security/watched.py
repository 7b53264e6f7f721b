"""A value read from files, read again when they change.

    get → files unchanged → the value as it was
        → changed, and read whole → the new value
        → changed, but broken or half-written → the value as it was, one warning per change
        → changed, but cannot be read         → the same, and whoever asks next tries again

Owns no thread: files are looked at when somebody asks. Any thread may ask, since gRPC does so from its own.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from tandem.errors import ConfigError
from tandem.logger import get_logger

_log = get_logger(__name__)

T = TypeVar("T")

_Marks: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""What tells two states of each file apart; None = the file is not there."""


class Watched(Generic[T]):
    """What `read` makes of the files at `paths`."""

    def __init__(self, what: str, paths: tuple[str, ...], read: Callable[[], T]) -> None:
        """`read` raises ConfigError if a file is no good; the constructor lets that through. `what` is for the log."""
        self._what = what
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._marks = _marks(paths)
        self._warned_of = self._marks
        self._value = read()

    def get(self) -> T:
        """The value of the files as they are now, or as they last were good. Never raises."""
        if _marks(self._paths) != self._marks:
            with self._lock:
                self._read_again()
        return self._value

    def _read_again(self) -> None:
        marks = _marks(self._paths)
        if marks == self._marks:  # another thread was here
            return
        try:
            value = self._read()
        except ConfigError as error:
            self._warn_once(marks, error)
            if _may_pass(error):
                return
        else:
            if _marks(self._paths) != marks:  # changed while they were read: the next to ask reads them
                return
            _log.info("files were read again", what=self._what)
            self._value = value
        self._marks = marks

    def _warn_once(self, marks: _Marks, error: ConfigError) -> None:
        if marks == self._warned_of:
            return
        self._warned_of = marks
        _log.warning("files changed but are no good; going on with those before", what=self._what, why=error.message)


def _may_pass(error: ConfigError) -> bool:
    """Whether reading failed, for want of descriptors say, and not what was read: files that stay as they are may do.

    An SSLError is an OSError too, and tells what the files hold.
    """
    return isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, ssl.SSLError)


def _marks(paths: tuple[str, ...]) -> _Marks:
    return tuple(map(_mark, paths))


def _mark(path: str) -> tuple[int, ...] | None:
    """Follows links: Kubernetes replaces mounted files by moving a link."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
