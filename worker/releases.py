"""Blocks on their way back to the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from engine.block_pool import BlockPool
from tandem.types import BlockId


class BlockReleases:
    """Gives blocks back to the pool, not before the engine is done with them.

    A launched step reads and writes the blocks of its seqs until it has ended. Blocks given up meanwhile wait until
    the newest step that was in flight then has ended; with none in flight they are free at once. Steps end in the
    order of their launch.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_launched = 0
        self._num_ended = 0
        self._waiting: deque[tuple[int, Sequence[BlockId]]] = deque()
        """Blocks, each with the number of the step after which these are released."""

    @property
    def num_in_flight(self) -> int:
        """Returns the number of steps that were launched and have not ended."""
        return self._num_launched - self._num_ended

    def release(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Takes over the caller's hold on these blocks, a table per holder."""
        self._waiting.extend((self._num_launched, table) for table in tables)
        self._release_due()

    def step_launched(self) -> None:
        """Notes that another step is in flight."""
        self._num_launched += 1

    def step_ended(self) -> None:
        """Notes the end of the oldest step in flight."""
        self._num_ended += 1
        self._release_due()

    def _release_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._num_ended:
            self._pool.release(self._waiting.popleft()[1])
