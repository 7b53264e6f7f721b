"""The disk tier: slots of a file that blocks of the host tier are written to, and read from into other rows later.

Owns the file, which has no name from the start on, so that no later process can find it, and the thread that alone
reads and writes it. Knows no tokens, and not who holds a slot. Reads go before writes, and each kind in the order in
which it was submitted: a slot may be free as soon as the read of it was submitted.
"""

from __future__ import annotations

import errno
import itertools
import os
import queue
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

_READ, _WRITE, _STOP = 1, 2, 0
"""In the order of their urgency."""
_CLOSE_S = 5.0
"""How long `close` waits for a disk."""


@dataclass(slots=True, eq=False)
class DiskJob:
    """Copies one block between a row and a slot; the result is written into the job."""

    slot: int
    row: int
    memory: memoryview
    """The row's bytes."""
    is_read: bool
    checksum: int = 0
    """xxh3-64 of the block: expected by a read, set by a write."""
    is_intact: bool = True
    """False: the bytes that were read differ from the bytes that were written."""
    error: OSError | None = None


class DiskTier:
    """`num_slots` slots of `block_bytes` bytes; `close` ends the tier."""

    def __init__(self, folder: Path, num_slots: int, block_bytes: int) -> None:
        """Takes the disk's space at once. Raises OSError if there is no such folder, or not so much space."""
        self.num_slots: Final = num_slots
        self._block_bytes = block_bytes
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by `close`
        try:
            os.posix_fallocate(self._file.fileno(), 0, num_slots * block_bytes)
        except OSError:
            self._file.close()
            raise
        self._submitted: queue.PriorityQueue[tuple[int, int, DiskJob | None]] = queue.PriorityQueue()
        self._number = itertools.count()
        self._done: deque[DiskJob] = deque()
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)
        self._thread.start()

    def submit(self, job: DiskJob) -> None:
        """Returns at once; the row's bytes are the thread's until the job is done."""
        self._submitted.put((_READ if job.is_read else _WRITE, next(self._number), job))

    def take_done(self) -> list[DiskJob]:
        """Jobs that are done since the last call, failed ones among them."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Ends the thread, without the jobs that have not begun, and gives the space back. Idempotent.

        A disk that hangs is left to the end of the process.
        """
        self._submitted.put((_STOP, next(self._number), None))
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        while (job := self._submitted.get()[-1]) is not None:
            try:
                self._do(job)
            except OSError as error:
                job.error = error
            self._done.append(job)

    def _do(self, job: DiskJob) -> None:
        fd, offset = self._file.fileno(), job.slot * self._block_bytes
        if job.is_read:
            num_bytes = os.preadv(fd, (job.memory,), offset)
        else:
            job.checksum = xxhash.xxh3_64_intdigest(job.memory)
            num_bytes = os.pwrite(fd, job.memory, offset)
        if num_bytes != self._block_bytes:
            raise OSError(errno.EIO, f"{num_bytes} of {self._block_bytes} bytes were moved")
        if job.is_read:
            job.is_intact = xxhash.xxh3_64_intdigest(job.memory) == job.checksum
