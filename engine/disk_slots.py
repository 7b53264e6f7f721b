"""Which slots of the disk tier hold known blocks, and the copies between them and rows of the host tier.

    store   a row's block goes to a slot; the row is in use until that is done
    load    a block comes back into a row, which is ready when that is done; the slot is free at once

What the disk has done is noticed by `take_done`, never waited for. An error of the disk ends its use for good. All on
the control loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.disk_tier import DiskJob, DiskSlot
from engine.host_rows import HostRows
from engine.step import HostRow
from shell.telemetry.logging import get_logger
from tandem.errors import InternalError

_log = get_logger(__name__)

_MOST_JOBS = 256
"""Blocks that may wait for the disk."""


class Disk(Protocol):
    """Copies blocks elsewhere than on the loop: `engine.disk_tier.DiskTier`."""

    @property
    def num_slots(self) -> int:
        """All slots, free or not."""

    def submit(self, job: DiskJob) -> None:
        """Begins one."""

    def take_done(self) -> list[DiskJob]:
        """Those that have ended since the last call."""


class DiskSlots:
    """Slots of `disk`, behind `rows`."""

    def __init__(self, disk: Disk, rows: HostRows) -> None:
        self._disk = disk
        self._rows = rows
        self._free = [DiskSlot(slot) for slot in range(disk.num_slots - 1, -1, -1)]
        self._checksums: dict[DiskSlot, int] = {}
        """Of slots that hold their block's bytes."""
        self._writes: dict[DiskSlot, DiskJob] = {}
        """The newest of each slot that is still under way."""
        self._num_jobs = 0
        self.num_writing = 0
        """Rows that will be free when they are written."""
        self.is_broken = False
        """The disk has failed: nothing goes there any more, and nothing comes back."""
        self._num_damaged = 0
        """Blocks that came back with other bytes than were written."""
        self.num_stored = self.num_loaded = self.num_failed = 0
        """Blocks that were written, and read; and those that were lost, because that failed."""

    @property
    def num_free(self) -> int:
        """Slots that `store` can take."""
        return len(self._free)

    @property
    def num_jobs_left(self) -> int:
        """How many blocks may be stored or loaded now."""
        return 0 if self.is_broken else _MOST_JOBS - self._num_jobs

    def is_ready(self, slot: DiskSlot) -> bool:
        """Whether it can be loaded."""
        return slot in self._checksums

    def store(self, row: HostRow) -> DiskSlot:
        """A slot that a ready row's block is written to; not to be called without a free one."""
        slot = self._free.pop()
        self._rows.pin((row,))
        self.num_writing += 1
        self._writes[slot] = self._submit(DiskJob(slot, row, self._rows.memory(row), is_read=False))
        return slot

    def load(self, slot: DiskSlot) -> HostRow:
        """A row that a ready slot's block is read into; not to be called without a free one."""
        row, checksum = self._rows.allocate(), self._checksums[slot]
        self._submit(DiskJob(slot, row, self._rows.memory(row), is_read=True, checksum=checksum))
        self.free((slot,))
        return row

    def free(self, slots: Iterable[DiskSlot]) -> None:
        """Nothing is known of these any more."""
        for slot in slots:
            self._checksums.pop(slot, None)
            self._writes.pop(slot, None)
            self._free.append(slot)

    def take_done(self) -> Sequence[HostRow]:
        """Takes note of what the disk has done; rows that it could not fill, for the caller to forget and to unpin."""
        unfilled: list[HostRow] = []
        for job in self._disk.take_done():
            self._num_jobs -= 1
            if job.error is not None:
                self._broke(job.error)
            elif not job.is_intact:
                self._damaged()
            is_good = job.error is None and job.is_intact
            self.num_failed += not is_good
            if job.is_read and not is_good:
                unfilled.append(job.row)
                continue
            if job.is_read:
                self._rows.filled((job.row,))
                self.num_loaded += 1
            else:
                self._written(job, is_good=is_good)
            self._rows.unpin((job.row,))
        return unfilled

    def check_slots(self, known: Sequence[DiskSlot]) -> None:
        """`known`: slots that somebody counts on. Raises InternalError unless all others are free."""
        if len(set(known)) != len(known) or not self._writes.keys() | self._checksums.keys() <= set(known):
            raise InternalError("a slot of the disk tier is in two places")
        if len(self._free) + len(known) != self._disk.num_slots:
            raise InternalError(f"slots were lost: {len(self._free)} free, {len(known)} known")

    def _submit(self, job: DiskJob) -> DiskJob:
        self._num_jobs += 1
        self._disk.submit(job)
        return job

    def _written(self, job: DiskJob, *, is_good: bool) -> None:
        self.num_writing -= 1
        if is_good:
            self.num_stored += 1
            if self._writes.get(job.slot) is job:  # else the slot has become another block's
                del self._writes[job.slot]
                self._checksums[job.slot] = job.checksum

    def _damaged(self) -> None:
        """Warns at the first damaged block, and whenever their number has doubled."""
        self._num_damaged += 1
        if self._num_damaged.bit_count() == 1:
            _log.warning(
                "blocks of the disk tier came back with other bytes and are computed again; is the disk sound?",
                blocks=self._num_damaged,
            )

    def _broke(self, error: OSError) -> None:
        if not self.is_broken:
            self.is_broken = True
            _log.error("the disk tier of the prefix cache is not used any more", error=str(error))
