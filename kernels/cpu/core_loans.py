"""Cores that workers of one machine lend each other while they compute nothing.

A memory file, the ledger, has an entry per core, in which the core's owner says when it computes
(`kernels/cpu/src/guests.h`): within each job of its native kernels. `tandem serve` makes the ledger and starts each
worker with a loan. A worker's cores are occupied from its start until it can compute, whatever its predecessor left.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from shell.config import core_loan

ENTRY_BYTES = 64


@dataclass(frozen=True, slots=True)
class CoreLoan:
    """What a worker may borrow. As text: `PATH:1,2`."""

    ledger: str
    """Path of the ledger."""
    cores: tuple[int, ...]
    """Cores of other workers."""

    def __str__(self) -> str:
        return f"{self.ledger}:{','.join(map(str, self.cores))}"

    @classmethod
    def of_text(cls, text: str) -> CoreLoan:
        """Returns the loan that `text` names; raises ValueError that says what is allowed."""
        ledger, _, cores = text.rpartition(":")
        if not ledger or not all(core.isdecimal() for core in cores.split(",")):
            raise ValueError("must be a path and cores, as PATH:1,2")
        return cls(ledger, tuple(map(int, cores.split(","))))

    @classmethod
    def of_process(cls) -> CoreLoan | None:
        """Returns the loan with which this process was started."""
        text = core_loan()
        return None if text is None else cls.of_text(text)


class CoreLedger:
    """A new ledger. It lives as long as this object or a process that has it mapped."""

    def __init__(self, cores: Sequence[int]) -> None:
        """With entries for all of `cores`. Linux only."""
        self._file = os.fdopen(os.memfd_create("tandem-cores"), "wb")
        self._file.truncate((max(cores) + 1) * ENTRY_BYTES)

    @property
    def path(self) -> str:
        """Path at which processes of the same user open the ledger."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def occupy(self, cores: Sequence[int]) -> None:
        """Keeps everybody from borrowing `cores`, until their owner clears their entries."""
        for core in cores:
            os.pwrite(self._file.fileno(), (1).to_bytes(4, sys.byteorder), core * ENTRY_BYTES)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
