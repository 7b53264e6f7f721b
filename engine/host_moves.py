"""The moves between pool and rows of the host tier that steps are to carry.

    store   a block leaves the pool: its row is filled by the next step that is launched
    load    a block comes back: the next step fills it; until that has ended well, the move holds block and row

A step that fails has moved nothing for sure: what it was to load is loaded by the next one, and a row that it was to
fill is never read. A row that a step or a copy to disk still uses is free only afterwards. All on the control loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.cache_counters import CacheCounters
from engine.host_tier import HostTier
from engine.row_book import RowBook
from engine.step import Direction, TierMove
from tandem.errors import InternalError
from tandem.lifecycle import BlockState
from tandem.types import BlockId

_WEIGHT = 0.1
"""Weight of the newest measurement in a moving average."""


@dataclass(slots=True)
class _Moves:
    stores: dict[int, BlockId] = field(default_factory=dict)
    loads: dict[BlockId, int] = field(default_factory=dict)


class HostMoves:
    """Between rows of `tier` and blocks of `pool`. Without a tier there are no rows, and so no moves."""

    def __init__(self, tier: HostTier | None, pool: BlockPool, counters: CacheCounters) -> None:
        self.rows = RowBook(0 if tier is None else tier.num_rows)
        self._tier = tier
        self._pool = pool
        self._counters = counters
        self._next = _Moves()
        """For the step that is built next."""
        self._in_flight: deque[_Moves] = deque()

    @property
    def num_withheld(self) -> int:
        """Returns the free blocks that a step in flight still reads: a step may write into them, a peer may not."""
        return sum(self._pool.state(block) is BlockState.FREE for block in self.leaving())

    @property
    def are_loading(self) -> bool:
        """Whether any block's bytes are still to come."""
        return bool(self._next.loads) or any(moves.loads for moves in self._in_flight)

    def is_loading(self, block: BlockId) -> bool:
        """Whether the block's bytes are still to come."""
        return block in self._next.loads or any(block in moves.loads for moves in self._in_flight)

    def memory(self, row: int) -> memoryview:
        """Returns the row's bytes."""
        assert self._tier is not None, "a row"
        return self._tier.row(row)

    def store(self, block: BlockId) -> int:
        """Takes a row for a block that is evicted now. Raises Overloaded if there is none."""
        row = self.rows.allocate()
        self._next.stores[row] = block
        return row

    def load(self, row: int, block: BlockId) -> None:
        """Takes over a row that is ready, to be moved into a LIVE block; holds the block until that is done."""
        self._pool.retain((block,))
        self._next.loads[block] = row

    def free(self, rows: Iterable[int]) -> None:
        """Gives rows back; a store into them that no step has taken is not made."""
        for row in rows:
            self._next.stores.pop(row, None)
            self.rows.free((row,))

    def take(self) -> tuple[TierMove, ...]:
        """Returns the moves that the step which is built now must carry."""
        moves, self._next = self._next, _Moves()
        self._in_flight.append(moves)
        self.rows.pin(moves.stores)
        stores = [TierMove(block, row, Direction.OUT) for row, block in moves.stores.items()]
        return (*stores, *(TierMove(block, row, Direction.IN) for block, row in moves.loads.items()))

    def step_ended(self, *, failed: bool) -> None:
        """The oldest step that took moves has ended."""
        if not self._in_flight:
            raise InternalError("a step has ended that took no moves")
        moves = self._in_flight.popleft()
        if failed:
            self._next.loads = moves.loads | self._next.loads
        else:
            self.rows.filled(moves.stores)
            self._counters.host_stored_blocks += len(moves.stores)
            self._counters.host_loaded_blocks += len(moves.loads)
            if moves.loads:
                self._pool.release(tuple(moves.loads))
                self.free(moves.loads.values())
        self.rows.unpin(moves.stores)

    def leaving(self) -> set[BlockId]:
        """Returns the blocks that steps in flight move out."""
        return {block for moves in self._in_flight for block in moves.stores.values()}

    def abandon_stores(self, blocks: Iterable[BlockId]) -> None:
        """Cancels moves out of these blocks that no step has taken: others than steps are to write there."""
        wanted = set(blocks)
        if self._next.stores and not wanted.isdisjoint(self._next.stores.values()):
            self._next.stores = {row: block for row, block in self._next.stores.items() if block not in wanted}

    def idle_loads(self) -> list[BlockId]:
        """Returns the blocks that the next step is to load, and for which no request waits."""
        return [block for block in self._next.loads if self._pool.ref_count(block) == 1]

    def abandon_loads(self, blocks: Iterable[BlockId]) -> None:
        """Cancels these `idle_loads`: the blocks are nobody's, and without content."""
        for block in blocks:
            row = self._next.loads.pop(block)
            self._pool.release((block,))
            self.free((row,))

    def check_rows(self, known: Sequence[int]) -> None:
        """`known`: rows that somebody counts on. Raises InternalError unless all others but those in use are free."""
        self.rows.check(known, [row for moves in (self._next, *self._in_flight) for row in moves.loads.values()])


class LoadCosts:
    """Whether loading blocks from the host tier is cheaper than computing them: by what both took lately."""

    def __init__(self, block_size: int, block_s: float) -> None:
        """`block_s`: what moving a block takes, in seconds."""
        self._token_s_at_least = block_s / block_size
        self._token_s: float | None = None

    @property
    def loading_pays(self) -> bool:
        """True as long as nothing was computed."""
        return self._token_s is None or self._token_s >= self._token_s_at_least

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Notes that a step computed `num_tokens` of prompts, perhaps beside other tokens."""
        newest = seconds / num_tokens
        self._token_s = newest if self._token_s is None else self._token_s + _WEIGHT * (newest - self._token_s)
