"""The copies between rows of the host tier and slots of the disk tier.

    store   a row's block goes to a slot; row and slot are in use until that is done
    load    a block comes back into a row, which is ready when that is done; the slot is free at once

What the disk has done is noticed by `take_done`, never waited for. The first error of the disk ends its use. All on the
control loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.cache_counters import CacheCounters
from engine.disk_tier import DiskJob
from engine.host_moves import HostMoves
from engine.row_book import RowBook
from shell.telemetry.logging import get_logger

_log = get_logger(__name__)

_MOST_JOBS = 256
"""Blocks that may wait for the disk."""


class Disk(Protocol):
    """Copies blocks elsewhere than on the loop: `engine.disk_tier.DiskTier`."""

    @property
    def num_slots(self) -> int:
        """All slots, free or not."""

    def submit(self, job: DiskJob) -> None:
        """Begins a job."""

    def take_done(self) -> list[DiskJob]:
        """Returns the jobs that have ended since the last call."""


class DiskCopies:
    """Between slots of `disk` and the rows of a host tier. Without a disk there are no slots, and so no copies."""

    def __init__(self, disk: Disk | None, host: HostMoves, counters: CacheCounters) -> None:
        self.slots = RowBook(0 if disk is None else disk.num_slots)
        self._disk = disk
        self._host = host
        self._counters = counters
        self._checksums: dict[int, int] = {}
        """Checksums of ready slots."""
        self._num_jobs = 0
        self.num_writing = 0
        """Rows that become free once written."""
        self.is_off = disk is None
        """Whether nothing goes to the disk and nothing comes back: there is none, or it has failed."""
        self._num_damaged = 0
        """Blocks that came back with other bytes than were written."""

    @property
    def num_jobs_left(self) -> int:
        """How many blocks may be stored or loaded now."""
        return 0 if self.is_off else _MOST_JOBS - self._num_jobs

    def store(self, row: int) -> int:
        """Takes a slot that a ready row's block is written to. Raises Overloaded if there is none."""
        slot = self.slots.allocate()
        self._host.rows.pin((row,))
        self.slots.pin((slot,))
        self.num_writing += 1
        self._submit(DiskJob(slot, row, self._host.memory(row), is_read=False))
        return slot

    def load(self, slot: int) -> int:
        """Takes a row that a ready slot's block is read into. Raises Overloaded if there is none."""
        row = self._host.rows.allocate()
        self._host.rows.pin((row,))
        self._submit(DiskJob(slot, row, self._host.memory(row), is_read=True, checksum=self._checksums[slot]))
        self.slots.free((slot,))
        return row

    def take_done(self) -> Sequence[int]:
        """Notes what the disk has done. Returns rows that it could not fill, for the caller to forget and to unpin."""
        unfilled: list[int] = []
        for job in () if self._disk is None else self._disk.take_done():
            self._num_jobs -= 1
            if job.error is not None:
                self._broke(job.error)
            elif not job.is_intact:
                self._damaged()
            is_good = job.error is None and job.is_intact
            self._counters.disk_failed_blocks += not is_good
            if not job.is_read:
                self._written(job, is_good=is_good)
            elif not is_good:
                unfilled.append(job.row)
                continue
            else:
                self._host.rows.filled((job.row,))
                self._counters.disk_loaded_blocks += 1
            self._host.rows.unpin((job.row,))
        return unfilled

    def _submit(self, job: DiskJob) -> None:
        assert self._disk is not None, "a slot"
        self._num_jobs += 1
        self._disk.submit(job)

    def _written(self, job: DiskJob, *, is_good: bool) -> None:
        self.num_writing -= 1
        if is_good:
            self._counters.disk_stored_blocks += 1
            self._checksums[job.slot] = job.checksum
            self.slots.filled((job.slot,))
        self.slots.unpin((job.slot,))

    def _damaged(self) -> None:
        """Warns at the first damaged block, and whenever their number has doubled."""
        self._num_damaged += 1
        if self._num_damaged.bit_count() == 1:
            _log.warning(
                "blocks of the disk tier came back with other bytes and are computed again; is the disk sound?",
                blocks=self._num_damaged,
            )

    def _broke(self, error: OSError) -> None:
        if not self.is_off:
            self.is_off = True
            _log.error("the disk tier of the prefix cache is not used any more", error=str(error))
