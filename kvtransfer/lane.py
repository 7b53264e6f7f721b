"""The seam between the control protocol and the ways to move payload.

A lane is the sender's way for one connection, a landing the receiver's. Everything else
(tickets, checksums, credit, ends) is the same for all transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.base import BlockRef
from tandem.types import BlockId


class Lane(Protocol):
    """The sender's way to move blocks over one connection."""

    @property
    def name(self) -> str:
        """The transport, as in `--transport`."""
        ...

    def place(self, sources: Sequence[BlockId], targets: Sequence[BlockRef]) -> tuple[int, ...]:
        """Checksums the sources and, where this lane writes by itself, copies them over.

        Runs on any thread; returns xxh3-64 of each source block.
        """
        ...

    def inline(self, sources: Sequence[BlockId]) -> Sequence[memoryview]:
        """What has to follow the WRITE frame on the connection; empty if `place` moved it."""
        ...

    def close(self) -> None:
        """Lets go of the peer's memory. Nothing can be placed afterwards. Idempotent."""
        ...


class Landing(Protocol):
    """The receiver's end of a lane."""

    @property
    def name(self) -> str:
        """The transport, as in `--transport`."""
        ...

    @property
    def inline(self) -> bool:
        """Payload follows WRITE frames, so that this side alone writes the blocks."""
        ...

    @property
    def shared_fd(self) -> int | None:
        """Descriptor to pass along with HELLO."""
        ...

    async def peer_dead(self) -> None:
        """Returns once the peer's process is proven dead (at once if it never could write).

        The one wait without a deadline: blocks stay quarantined for exactly so long.
        """
        ...

    def close(self) -> None:
        """Lets go of what is held about the peer. Idempotent."""
        ...
