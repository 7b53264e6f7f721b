"""Rows of the parts of one pool, cut into the grains of a plan: what a lane copies, sends and verifies.

Grain `place` of row `i` of a part with m grains is row `i * m + place` of that part's memory, counted in grains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtransfer.plan import Plan, Span
from kvtransfer.rows import Rows


class Piece(NamedTuple):
    """Neighbouring bytes of some blocks."""

    memory: memoryview
    rows: Rows
    """Counted in grains."""
    ids: tuple[int, ...]
    """The grains in `memory`, as `rows` counts them."""


class GrainRows:
    """Borrows the pool's `parts` until `close`."""

    def __init__(self, parts: Sequence[Rows], spans: Sequence[Span]) -> None:
        """`parts` are by rank; `spans` names the parts that are used."""
        self.parts = parts
        self._spans = spans
        self._cut = [parts[rank].cut(len(grains)) for rank, grains in spans]
        """As `spans`."""
        self._by_rank = {span.rank: i for i, span in enumerate(spans)}

    def checksums(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Returns xxh3-64 of each grain as it lies in memory now: row by row, of each row part by part."""
        if len(self._cut) == 1:
            return self._cut[0].checksums(self._ids(0, rows))
        found = [cut.checksums(self._ids(i, rows)) for i, cut in enumerate(self._cut)]
        return _flat([np.array(each, np.uint64).reshape(len(rows), -1) for each in found])

    def copy_to(self, other: GrainRows, plan: Plan, rows: Sequence[int], other_rows: Sequence[int]) -> tuple[int, ...]:
        """Copies row `rows[i]` to row `other_rows[i]`. Returns the grains' checksums, row by row."""
        found: dict[int, tuple[int, ...]] = {}
        for move in plan.moves():
            i, to = self._by_rank[move.source], other._by_rank[move.target]
            ids, target_ids = self._ids(i, rows, move.source_place), other._ids(to, other_rows, move.target_place)
            checksums = self._cut[i].copy_to(other._cut[to], ids, target_ids)
            found[self._spans[i].grains[move.source_place]] = checksums
        if len(found) == 1:
            return found[0]
        return _flat([np.array(found[grain], np.uint64)[:, None] for grain in range(plan.num_grains)])

    def pieces(self, rows: Sequence[int]) -> Iterator[Piece]:
        """Yields the rows' bytes, row by row and part by part. Of a pool in one part, neighbours share a piece."""
        for some in [rows] if len(self._cut) == 1 else [(row,) for row in rows]:
            for i, cut in enumerate(self._cut):
                ids, start = tuple(self._ids(i, some)), 0
                for memory in cut.spans(ids):
                    end = start + len(memory) // cut.row_bytes
                    yield Piece(memory, cut, ids[start:end])
                    start = end

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        for cut in self._cut:
            cut.close()

    def _ids(self, i: int, rows: Sequence[int], place: int | None = None) -> Sequence[int]:
        """The grains of these rows in part `i`, or the one at `place` of each."""
        size = len(self._spans[i].grains)
        if size == 1:
            return rows
        places = range(size) if place is None else (place,)
        return [row * size + each for row in rows for each in places]


def _flat(columns: Sequence[np.typing.NDArray[np.uint64]]) -> tuple[int, ...]:
    """`[n, ...]` each, beside each other, row by row."""
    return tuple(np.concatenate(columns, 1).ravel().tolist())
