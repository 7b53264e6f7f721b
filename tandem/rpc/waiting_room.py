"""Where callers stay for a moment: a few at a time, and nobody for long.

Who comes when all seats are taken gets the seat of the one who has sat longest. So those who stay on
purpose turn each other out, and keep nobody out who is soon gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.errors import DeadlineExceeded


class WaitingRoom:
    """`seats` for callers, each for `longest_s` at most."""

    def __init__(self, seats: int, longest_s: float) -> None:
        self._seats = seats
        self._longest_s = longest_s
        self._seated: dict[asyncio.Timeout, None] = {}
        """Who has sat longest comes first."""

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[None]:
        """Raises DeadlineExceeded in who stays too long, or has sat longest when a seat is needed."""
        if len(self._seated) >= self._seats:
            self._turn_out(next(iter(self._seated)))
        ends = asyncio.timeout(self._longest_s)
        self._seated[ends] = None
        try:
            async with ends:
                yield
        except TimeoutError as error:
            raise DeadlineExceeded("the caller took too long") from error
        finally:
            self._seated.pop(ends, None)

    def _turn_out(self, ends: asyncio.Timeout) -> None:
        del self._seated[ends]
        if not ends.expired():
            ends.reschedule(0)
