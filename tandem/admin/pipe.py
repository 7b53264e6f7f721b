"""Bytes passed on from one transport to another, as fast as the other takes them. Knows no HTTP.

    caller ◀──▶ transport A  ─ Pipe(to B) ─▶  transport B ◀──▶ server
                transport A  ◀─ Pipe(to A) ─  transport B

A pipe is the protocol of the transport that it reads. Where that ends, the other is closed.
"""

from __future__ import annotations

import asyncio


class Pipe(asyncio.Protocol):
    """One direction, and the back-pressure of the other."""

    def __init__(self, to: asyncio.Transport) -> None:
        self._to = to

    def data_received(self, data: bytes) -> None:
        """Called by the transport."""
        self._to.write(data)

    def pause_writing(self) -> None:
        """What this pipe's own transport cannot write must not be read from the other."""
        if not self._to.is_closing():
            self._to.pause_reading()

    def resume_writing(self) -> None:
        """Its own transport has room again."""
        if not self._to.is_closing():
            self._to.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Lets the other end once it has written what it has."""
        del error
        self._to.close()
