"""Rows of host memory that blocks of a pool elsewhere pass through, where a transport reaches nothing else.

    first half      cut into slices, each lent to one peer that writes by itself, as long as it is connected
    third quarter   `arriving`: received here, then copied into the pool
    last quarter    `leaving`: copied out of the pool, then sent

What arrives and what leaves never wait for each other: two workers that send to each other would else wait for ever.
Every row but those of a slice comes back once a wire has moved or was given up.
"""

from __future__ import annotations

from kvtransfer.host_rows import HostRows
from kvtransfer.room import FreeRows
from kvtransfer.row_copy import Rows
from tandem.errors import InternalError

MAX_SLICES = 16
"""Peers that write by themselves at a time: as many as a machine has workers on its GPUs, about."""
MIN_ROWS = 4


class HostRing(HostRows):
    """A row means nothing by itself: whoever was given it says which block lies there."""

    def __init__(self, rows: Rows) -> None:
        """`rows` `[R, block_bytes]` uint8, R >= MIN_ROWS. Raises InternalError."""
        super().__init__(rows)
        num_rows = len(rows)
        if num_rows < MIN_ROWS:
            raise InternalError(f"a ring of {num_rows} rows; {MIN_ROWS} are the least")
        lent, arriving = num_rows // 2, num_rows * 3 // 4
        size = max(1, lent // MAX_SLICES)
        self._slices = [range(first, first + size) for first in range(0, lent - size + 1, size)][:MAX_SLICES]
        self.arriving = FreeRows(range(lent, arriving))
        self.leaving = FreeRows(range(arriving, num_rows))

    def lend_slice(self) -> range | None:
        """Rows for one peer alone, until `return_slice`; None if all are lent."""
        return self._slices.pop() if self._slices else None

    def return_slice(self, rows: range) -> None:
        """The peer is proven unable to write there."""
        self._slices.append(rows)
