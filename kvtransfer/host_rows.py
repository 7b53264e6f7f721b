"""Rows of bytes in host memory, as lanes send, receive and verify them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtransfer.row_copy import Rows, row_checksums


class HostRows:
    """Borrows `rows` until `close`; never frees or resizes it."""

    def __init__(self, rows: Rows) -> None:
        """`rows` `[R, row_bytes]` uint8, contiguous."""
        self.rows = rows
        self._row_bytes: int = rows.shape[1]
        self._bytes = rows.reshape(-1).data  # [R * row_bytes]

    def spans(self, rows: Iterable[int]) -> list[memoryview]:
        """The rows' bytes in order, writable, runs of neighbours as one span."""
        runs: list[tuple[int, int]] = []
        for row in rows:
            if runs and row == runs[-1][0] + runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((row, 1))
        return [self._span(first, n) for first, n in runs]

    def checksums(self, rows: Iterable[int]) -> tuple[int, ...]:
        """xxh3-64 of each row as it lies in memory now."""
        return row_checksums(self.rows, tuple(rows))

    def close(self) -> None:
        """Lets go of the memory. Idempotent."""
        self._bytes.release()
        self.rows = np.empty((0, self._row_bytes), np.uint8)

    def _span(self, first: int, num_rows: int = 1) -> memoryview:
        return self._bytes[first * self._row_bytes : (first + num_rows) * self._row_bytes]
