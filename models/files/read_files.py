"""Files that are read by path more than once, and must be the same each time: a fingerprint is of what was read.

    note ─▶ read, hash, in any order ─▶ check: raises if a path no longer leads to what was noted

Compared are device, inode, size and both times: a file that takes another's place has another inode, and a write moves
`ctime`, which nobody can set.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from tandem.errors import CheckpointError

_TICK_S = 0.02
"""Two ticks of the slowest kernel's clock: two changes that are nearer to each other may have one `ctime`."""

_State = tuple[int, ...] | None
"""None: there is no such file."""


class ReadFiles:
    """Paths, and the file that each led to before it was first read."""

    def __init__(self, *paths: Path) -> None:
        self._states: dict[Path, _State] = {}
        self.note(*paths)

    def __iter__(self) -> Iterator[Path]:
        """The paths that led to a file, in the order in which they were noted."""
        return (path for path, state in self._states.items() if state is not None)

    def note(self, *paths: Path) -> None:
        """To be called before `paths` are read. Raises CheckpointError if one is being written."""
        for path in paths:
            if path not in self._states:
                self._states[path] = _settled(path)

    def check(self) -> None:
        """To be called when all is read and hashed. Raises CheckpointError naming a file that has changed since."""
        for path, state in self._states.items():
            if _state(path) != state:
                raise _changed(path)


def _settled(path: Path) -> _State:
    """Waits until a later change cannot have the `ctime` that is returned."""
    state = _state(path)
    if state is not None and 0 <= time.time_ns() - state[-1] < _TICK_S * 1e9:
        time.sleep(_TICK_S)
        if _state(path) != state:
            raise _changed(path)
    return state


def _state(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: changed while it was loaded: start again once the new file is whole")
