"""Lines on their way to standard error: whoever logs never waits, and never fails, because nobody takes them.

    write_line ──▶ queue ──▶ one thread ──▶ standard error
                    └─ full      └─ OSError: the line is dropped and counted

A full file system, or a reader that has gone or does not read, costs lines. Once lines are written again, one more says
how many were lost. What others write to standard error by themselves (warnings, a crash's traceback, native libraries)
does not come by here, and may still wait for a reader.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable

from tandem.logger import get_logger

_log = get_logger(__name__)

MAX_PENDING_CHARS = 1024 * 1024
"""Some thousand lines: a burst."""
_STDERR = 2
FLUSH_S = 1.0
"""How long a process that ends waits for its last lines to be taken."""


class LineWriter:
    """A bounded queue of lines, and the thread that writes them. All calls from any thread; none but `flush` waits."""

    def __init__(self, write: Callable[[str], None], max_pending_chars: int = MAX_PENDING_CHARS) -> None:
        """`write` takes one line with its end. It may block, and may raise: the line is lost then."""
        self._write = write
        self._max_pending_chars = max_pending_chars
        self._pending: deque[str] = deque()
        """Lines that are not written yet."""
        self._pending_chars = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._told = 0

    @property
    def dropped(self) -> int:
        """Lines that were lost so far."""
        return self._dropped

    def put(self, line: str) -> None:
        """Queues one line, given without its end; drops it if too much waits."""
        with self._changed:
            if self._pending_chars + len(line) >= self._max_pending_chars:
                self._dropped += 1
                return
            self._pending.append(f"{line}\n")
            self._pending_chars += len(line) + 1
            self._changed.notify_all()
            if self._thread is None:
                with contextlib.suppress(RuntimeError):  # no thread to be had; the next line tries again
                    thread = threading.Thread(target=self._run, name="log lines", daemon=True)
                    thread.start()
                    self._thread = thread

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Waits until no line is pending, so long at most; whether that came."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                line = self._pending[0]
            written = self._written(line)
            with self._changed:
                self._pending.popleft()
                self._pending_chars -= len(line)
                self._dropped += not written
                lost = 0 if self._pending or not written else self._dropped - self._told
                self._told += lost
                self._changed.notify_all()
            if lost:
                _log.warning("log lines were lost", lines=lost)

    def _written(self, line: str) -> bool:
        try:
            self._write(line)
        except Exception:  # noqa: BLE001  (the thread's root: the log must go on, whatever the stream is by now)
            return False
        return True


def write_to_stderr(line: str) -> None:
    """Writes one line to standard error as it is at the time: a progress bar replaces it while it is shown.

    Past its buffer, whose lock a process could not end without while a write blocks. Raises OSError.
    """
    stream = sys.stderr
    if stream is None:  # closed when the process was started
        raise OSError(errno.EBADF, "no standard error")
    if stream is not sys.__stderr__:
        stream.write(line)
        return
    data = line.encode(errors="backslashreplace")
    while data:
        try:
            data = data[os.write(_STDERR, data) :]
        except BlockingIOError:  # shared with a process that made it so
            select.select([], [_STDERR], [])


_stderr = LineWriter(write_to_stderr)
"""Writer of the process's standard error."""
write_line = _stderr.put
flush_lines = _stderr.flush
atexit.register(flush_lines)


def lines_dropped() -> int:
    """Lines of this process's log that were lost."""
    return _stderr.dropped
