"""Cores that workers of one machine lend each other while they compute nothing.

In a memory file, the ledger, each core has an entry in which its owner says when it computes
(`kernels/cpu/src/team.h`): within each job of its native kernels. `tandem serve` makes the ledger and tells each worker
what it may borrow. A worker's cores are occupied from its start until it can compute, whatever the one before left.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

ENTRY_BYTES = 64


@dataclass(frozen=True, slots=True)
class CoreLoan:
    """What one worker may borrow. As text: `PATH:1,2`."""

    ledger: str
    """Path of the ledger."""
    cores: tuple[int, ...]
    """Of others."""

    def __str__(self) -> str:
        return f"{self.ledger}:{','.join(map(str, self.cores))}"

    def group(self) -> str:
        """Names ledger and cores, those of this process, which borrows, and what it may borrow.

        Equal for two that lend each other all they have.
        """
        cores = sorted({*self.cores, *os.sched_getaffinity(0)})
        return f"{socket.gethostname()}:{self.ledger}:{','.join(map(str, cores))}"

    @classmethod
    def of_text(cls, text: str) -> CoreLoan:
        """Raises ValueError that says what is allowed."""
        ledger, _, cores = text.rpartition(":")
        if not ledger or not all(core.isdecimal() for core in cores.split(",")):
            raise ValueError("must be a path and cores, as PATH:1,2")
        return cls(ledger, tuple(map(int, cores.split(","))))


class CoreLedger:
    """A new ledger. It lives as long as this object or a process that has it mapped."""

    def __init__(self, cores: Sequence[int]) -> None:
        """With entries for all of `cores`. Linux only."""
        self._file = os.fdopen(os.memfd_create("tandem-cores"), "wb")
        self._file.truncate((max(cores) + 1) * ENTRY_BYTES)

    @property
    def path(self) -> str:
        """At which processes of the same user open it."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def occupy(self, cores: Sequence[int]) -> None:
        """Nobody borrows `cores` from now on, until their owner clears their entries."""
        for core in cores:
            os.pwrite(self._file.fileno(), (1).to_bytes(4, sys.byteorder), core * ENTRY_BYTES)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
