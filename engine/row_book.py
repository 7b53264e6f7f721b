"""The book of one tier's rows: which are free, which hold their block's bytes, which are in use. Knows no bytes.

Rows of the host tier and slots of the disk tier are both kept so, on the control loop:

    allocate   a row for one block; it is not ready
    filled     the row holds its block's bytes
    pin        somebody reads or writes the row's bytes, until `unpin`
    free       the row is given back, as soon as nobody uses it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Final

from tandem.errors import InternalError, Overloaded


class RowBook:
    """Rows `0 … num_rows - 1`, each with at most a single holder."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows: Final = num_rows
        """All rows, free or not."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._is_ready: dict[int, bool] = {}
        """Whether each held row is ready."""
        self._pins: Counter[int] = Counter()
        self._doomed: set[int] = set()
        """Pinned rows that are to be free."""

    @property
    def num_free(self) -> int:
        """Rows that `allocate` can hand out now."""
        return len(self._free)

    def allocate(self) -> int:
        """Takes a row, which the caller frees. Raises Overloaded if there is none."""
        if not self._free:
            raise Overloaded(f"none of {self.num_rows} rows of a tier is free")
        row = self._free.pop()
        self._is_ready[row] = False
        return row

    def free(self, rows: Iterable[int]) -> None:
        """Gives rows back, each as soon as nobody uses it. Raises InternalError on a row that is not held."""
        for row in rows:
            if row in self._doomed or row not in self._is_ready:
                raise InternalError(f"free of row {row}, which is not held")
            if self._pins[row]:
                self._doomed.add(row)
            else:
                self._give_back(row)

    def filled(self, rows: Iterable[int]) -> None:
        """Notes that these held rows have their blocks' bytes now."""
        self._is_ready.update(dict.fromkeys(rows, True))

    def is_ready(self, row: int) -> bool:
        """Whether the row holds its block's bytes."""
        return self._is_ready[row]

    def num_ready(self, rows: Sequence[int]) -> int:
        """Returns how many of the first rows are ready, without a gap."""
        return sum(1 for _ in takewhile(self.is_ready, rows))

    def num_idle(self, rows: Sequence[int], at_most: int) -> int:
        """Returns how many of the last rows, `at_most` of them, are ready and in nobody's use, without a gap."""
        last = rows[-at_most:][::-1]
        return sum(1 for _ in takewhile(lambda row: self.is_ready(row) and not self.is_pinned(row), last))

    def pin(self, rows: Iterable[int]) -> None:
        """Keeps rows from being free while their bytes are in use; paired with `unpin`."""
        for row in rows:
            self._pins[row] += 1

    def unpin(self, rows: Iterable[int]) -> None:
        """Undoes `pin`."""
        for row in rows:
            self._pins[row] -= 1
            if not self._pins[row] and row in self._doomed:
                self._doomed.remove(row)
                self._give_back(row)

    def is_pinned(self, row: int) -> bool:
        """Whether somebody uses the row's bytes, so that it would not be free at once."""
        return self._pins[row] > 0

    def check(self, known: Collection[int], held: Collection[int] = ()) -> None:
        """Raises InternalError unless all rows but `known`, `held` and those that will be free are free."""
        counted = {*known, *held, *self._doomed}
        if len(counted) != len(known) + len(held) + len(self._doomed) or counted != self._is_ready.keys():
            raise InternalError("a row of a tier is in two places, or was lost")
        if len(self._free) + len(counted) != self.num_rows:
            raise InternalError(f"rows of a tier were lost: {len(self._free)} free, {len(counted)} held")

    def _give_back(self, row: int) -> None:
        del self._is_ready[row], self._pins[row]
        self._free.append(row)
