"""Rows of memory that the blocks of one WRITE pass through: who gets them, in which order, when they come back. Pure.

take → (waits in line) → Loan → release → the next in line
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

_SHARE = 4
"""One loan takes a quarter of the rows at most, so that several WRITEs pass through together."""


class Loan:
    """Place for `num_blocks` blocks until `release`."""

    def __init__(
        self,
        num_blocks: int,
        rows: tuple[int, ...] = (),
        give_back: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        """`rows`: one per block, or none where blocks need no row; `give_back` gets them, once."""
        self.num_blocks = num_blocks
        self.rows = rows
        self.num_spans = 0
        """Spans of memory in which the lane wrote or sent the blocks: its descriptors, system calls or copies."""
        self._give_back = give_back

    def rows_for(self, blocks: Sequence[int]) -> Sequence[int]:
        """Returns the row of each of these blocks: the lent rows, or where blocks need none the blocks themselves."""
        return self.rows or blocks

    def release(self) -> None:
        """Ends all reading and writing of the rows for this WRITE. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self.rows)


class Ring:
    """Lends rows first come, first served. INVARIANT: no row is in two loans, or in a loan and free.

    Without rows it lends to every WRITE at once, for all its blocks: these need no row.
    """

    def __init__(self, rows: Sequence[int] | None = None) -> None:
        """`rows`: not empty; None = blocks need no row."""
        self._is_needed = rows is not None
        self._free = list(reversed(rows or ()))  # the last one used is the next: the processor may have it in its cache
        self._most = max(1, len(self._free) // _SHARE)
        self._line: deque[tuple[int, asyncio.Future[Loan]]] = deque()
        self.num_returned = 0
        """Rows returned since the start: grows while other borrowers make progress."""

    @property
    def num_free(self) -> int:
        """Rows in no loan."""
        return len(self._free)

    def take(self, at_most: int) -> asyncio.Future[Loan]:
        """Returns a future of a loan for 1 to `at_most` blocks. A caller without use for the loan calls `give_up`."""
        wanted: asyncio.Future[Loan] = asyncio.get_running_loop().create_future()
        if self._is_needed:
            self._line.append((min(at_most, self._most), wanted))
            self._serve()
        else:
            wanted.set_result(Loan(at_most))
        return wanted

    async def taken(self, at_most: int) -> Loan:
        """Waits for a loan of 1 to `at_most` blocks; a cancelled call gives the loan up."""
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
                wanted.set_result(Loan(len(rows), rows, self._give_back))


def give_up(wanted: asyncio.Future[Loan]) -> None:
    """Leaves the line, and gives back a loan that has come."""
    if not wanted.cancel() and not wanted.cancelled():
        wanted.result().release()
