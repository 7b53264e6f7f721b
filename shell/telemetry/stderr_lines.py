"""Lines on their way to standard error: whoever logs never waits, and never fails, because nobody takes them.

    write_line ──▶ queue ──▶ one thread ──▶ standard error
                    └─ full      └─ OSError: the line is dropped and counted

A full file system, or a reader that has gone or does not read, costs lines. Once lines are written again, one more says
how many were lost. What others write to standard error past this module (warnings, a crash's traceback, native
libraries) may still wait for a reader.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import select
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

from tandem.logger import get_logger

_log = get_logger(__name__)

MAX_LINES = 4096
"""Lines that may wait: a burst."""
FLUSH_S = 1.0
"""How long a process that ends waits for its last lines to be taken."""
_STDERR = 2


class LineWriter:
    """A bounded queue of lines, and the thread that writes them. All calls from any thread; none but `flush` waits."""

    def __init__(self, write: Callable[[str], None], max_lines: int = MAX_LINES) -> None:
        """`write` takes one line with its end. It may block, and may raise: the line is lost then."""
        self._write = write
        self._max_lines = max_lines
        self._queue: SimpleQueue[str | threading.Event] = SimpleQueue()
        """Lines, and events that are set once all lines before them are written."""
        self._lock = threading.Lock()
        self._started = False
        self.dropped = 0
        """Lines that were lost so far."""

    def put(self, line: str) -> None:
        """Queues one line, given without its end; drops it if too many wait."""
        with self._lock:
            if self._queue.qsize() >= self._max_lines:
                self.dropped += 1
                return
            self._queue.put(f"{line}\n")
            if not self._started:
                with contextlib.suppress(RuntimeError):  # no thread can be started now; the next line tries again
                    threading.Thread(target=self._run, name="log lines", daemon=True).start()
                    self._started = True

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Waits until the lines put so far are written or lost, for `timeout_s` at most; returns whether they are."""
        if not self._started and self._queue.empty():
            return True
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_s)

    def _run(self) -> None:
        num_reported = 0
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._write(item)
            except Exception:  # noqa: BLE001  (the thread's root: the log must go on, whatever the stream is by now)
                with self._lock:
                    self.dropped += 1
                continue
            lost = self.dropped - num_reported
            if lost and self._queue.qsize() < self._max_lines / 2:  # else the report itself might be lost
                num_reported += lost
                _log.warning("log lines were lost", lines=lost)


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
