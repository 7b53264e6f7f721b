"""Rows of memory that the blocks of one WRITE pass through: who gets them, in which order, when they come back. Pure.

take → (waits in line) → Room → release → the next in line
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

_SHARE = 4
"""Nobody gets more than one part in so many at once, so that several pass through together."""


class Room:
    """For `num_blocks` blocks, set aside until `release`."""

    def __init__(
        self,
        num_blocks: int,
        rows: tuple[int, ...] = (),
        give_back: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        """`rows`: one per block, or none where blocks need no row; `give_back` gets them, once."""
        self.num_blocks = num_blocks
        self.rows = rows
        self._give_back = give_back

    def release(self) -> None:
        """Nobody reads or writes the rows for this WRITE any more. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self.rows)


def unbounded(num_blocks: int) -> asyncio.Future[Room]:
    """Room where blocks need no row: at once, for all of them."""
    found: asyncio.Future[Room] = asyncio.get_running_loop().create_future()
    found.set_result(Room(num_blocks))
    return found


def give_up(wanted: asyncio.Future[Room]) -> None:
    """Leaves the line, and gives back what was got meanwhile."""
    if not wanted.cancel() and not wanted.cancelled():
        wanted.result().release()


class FreeRows:
    """Hands out rows first come, first served. INVARIANT: no row is in two rooms, or in a room and free."""

    def __init__(self, rows: Sequence[int]) -> None:
        """At least one row."""
        self._free = list(reversed(rows))  # the last one used is the next: it may still be in the processor's cache
        self._most = max(1, len(rows) // _SHARE)
        self._line: deque[tuple[int, asyncio.Future[Room]]] = deque()
        self.num_returned = 0
        """Rows that came back so far: grows while others make progress."""

    @property
    def num_free(self) -> int:
        """Rows in no room."""
        return len(self._free)

    def take(self, at_most: int) -> asyncio.Future[Room]:
        """A future of room for 1 to `at_most` blocks. Whoever does not want it any more calls `give_up`."""
        wanted: asyncio.Future[Room] = asyncio.get_running_loop().create_future()
        self._line.append((min(at_most, self._most), wanted))
        self._serve()
        return wanted

    async def taken(self, at_most: int) -> Room:
        """As `take`, awaited."""
        wanted = self.take(at_most)
        try:
            return await wanted
        except asyncio.CancelledError:
            give_up(wanted)
            raise

    def _give_back(self, rows: tuple[int, ...]) -> None:
        self._free.extend(reversed(rows))
        self.num_returned += len(rows)
        self._serve()

    def _serve(self) -> None:
        while self._line and self._free:
            at_most, wanted = self._line.popleft()
            if not wanted.done():  # else given up
                rows = tuple(self._free.pop() for _ in range(min(at_most, len(self._free))))
                wanted.set_result(Room(len(rows), rows, self._give_back))
