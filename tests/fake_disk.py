"""A disk tier that copies, when it is told to, what stands for the bytes of a block."""

from __future__ import annotations

import errno
import random
from typing import Any

from engine.disk_tier import DiskJob

OTHER_BYTES = "other bytes"


class FakeDisk:
    """Between the content of `rows`, by number, and its slots."""

    def __init__(self, num_slots: int, rows: dict[int, Any]) -> None:
        self.num_slots = num_slots
        self.slots: dict[int, Any] = {}
        self.jobs: list[DiskJob] = []
        self._rows = rows
        self._done: list[DiskJob] = []

    def submit(self, job: DiskJob) -> None:
        self.jobs.append(job)

    def take_done(self) -> list[DiskJob]:
        done, self._done = self._done, []
        return done

    def work(self, outcome: str = "well") -> None:
        """Does one job, reads first, well, or so that it ends in `OTHER_BYTES` or "error". A no-op without jobs."""
        if not self.jobs:
            return
        job = next((each for each in self.jobs if each.is_read), self.jobs[0])
        self.jobs.remove(job)
        self._done.append(job)
        moved = self.slots[job.slot] if job.is_read else self._rows[job.row]
        if job.is_read:
            assert _checksum(moved) == job.checksum, "a slot that is read holds what was written for it"
        else:
            job.checksum = _checksum(moved)
        if outcome == OTHER_BYTES and job.is_read:
            moved, job.is_intact = OTHER_BYTES, False
        elif outcome == "error":
            moved, job.error = OTHER_BYTES, OSError(errno.EIO, "bad disk")
        if job.is_read:
            self._rows[job.row] = moved
        else:
            self.slots[job.slot] = moved


class LateDisk(FakeDisk):
    """Does a few of its jobs, or none, before each look at what is done."""

    def __init__(self, num_slots: int, rows: dict[int, Any], seed: int = 0) -> None:
        super().__init__(num_slots, rows)
        self._rng = random.Random(seed)

    def take_done(self) -> list[DiskJob]:
        for _ in range(self._rng.randrange(4)):
            self.work("well" if self._rng.random() < 0.9 else OTHER_BYTES)
        return super().take_done()


def _checksum(content: object) -> int:
    return hash(repr(content))
