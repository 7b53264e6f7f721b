"""Which rows of the host tier hold known blocks, and the moves between rows and pool that steps are to carry.

    store   a block leaves the pool: its row is filled by the next step that is launched
    load    a block comes back: the next step fills it; until that has ended well, the move holds block and row

A step that fails has moved nothing for sure: what it was to load is loaded by the next one, and a row that it was to
fill is never read. A row that a step or a copy to disk still uses is free only afterwards. All on the control loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from engine.block_pool import BlockPool
from engine.host_tier import HostTier
from engine.step import Direction, HostRow, TierMove
from tandem.errors import InternalError
from tandem.lifecycle import BlockState
from tandem.types import BlockId

_WEIGHT = 0.1
"""Of the newest measurement in a moving average."""


@dataclass(slots=True)
class _Moves:
    """Of one step."""

    stores: dict[HostRow, BlockId] = field(default_factory=dict)
    loads: dict[BlockId, HostRow] = field(default_factory=dict)


class HostRows:
    """Rows of `tier`, beside the blocks of `pool`."""

    def __init__(self, tier: HostTier, pool: BlockPool) -> None:
        self._tier = tier
        self._pool = pool
        self._next = _Moves()
        """For the step that is built next."""
        self._in_flight: deque[_Moves] = deque()
        self._unready: set[HostRow] = set()
        """Rows that were not filled yet, or never will be."""
        self._pins: Counter[HostRow] = Counter()
        self._doomed: set[HostRow] = set()
        """Pinned rows that are to be free."""
        self.num_stored = self.num_loaded = 0
        """Blocks that steps have moved."""

    @property
    def num_free(self) -> int:
        """Rows that `store` can take."""
        return self._tier.num_free

    @property
    def num_rows(self) -> int:
        """All rows, free or not."""
        return self._tier.num_rows

    @property
    def num_withheld(self) -> int:
        """Free blocks that a step in flight still reads: another step may write into them, a peer may not."""
        return sum(self._pool.state(block) is BlockState.FREE for block in self.leaving())

    def is_ready(self, row: HostRow) -> bool:
        """Whether it holds its block's bytes."""
        return row not in self._unready

    @property
    def are_loading(self) -> bool:
        """Whether any block's bytes are still to come."""
        return bool(self._next.loads) or any(moves.loads for moves in self._in_flight)

    def is_loading(self, block: BlockId) -> bool:
        """Whether its bytes are still to come."""
        return block in self._next.loads or any(block in moves.loads for moves in self._in_flight)

    def store(self, block: BlockId) -> HostRow:
        """A row for a block that is evicted now; not to be called without a free one."""
        (row,) = self._tier.allocate(1)
        self._next.stores[row] = block
        self._unready.add(row)
        return row

    def load(self, row: HostRow, block: BlockId) -> None:
        """Takes over a row that is ready, to be moved into a LIVE block; holds the block until that is done."""
        self._pool.retain((block,))
        self._next.loads[block] = row

    def free(self, rows: Iterable[HostRow]) -> None:
        """Gives rows back, each as soon as nobody uses it."""
        for row in rows:
            if self._pins[row]:
                self._doomed.add(row)
                continue
            self._next.stores.pop(row, None)
            self._unready.discard(row)
            del self._pins[row]
            self._tier.free((row,))

    def allocate(self) -> HostRow:
        """A row that somebody else fills, pinned until `unpin`; not to be called without a free one."""
        (row,) = self._tier.allocate(1)
        self._unready.add(row)
        self.pin((row,))
        return row

    def filled(self, rows: Sequence[HostRow]) -> None:
        """They hold their blocks' bytes now."""
        self._unready.difference_update(rows)

    def memory(self, row: HostRow) -> memoryview:
        """Its bytes."""
        return self._tier.row(row)

    def is_pinned(self, row: HostRow) -> bool:
        """Whether somebody uses its bytes, so that it would not be free at once."""
        return bool(self._pins[row])

    def num_idle(self, rows: Sequence[int], at_most: int) -> int:
        """How many of these last ones are ready, and in nobody's use."""
        last = (HostRow(row) for row in rows[-at_most:][::-1])
        return sum(1 for _ in takewhile(lambda row: self.is_ready(row) and not self.is_pinned(row), last))

    def pin(self, rows: Iterable[HostRow]) -> None:
        """Their bytes are in use; paired with `unpin`."""
        for row in rows:
            self._pins[row] += 1

    def unpin(self, rows: Iterable[HostRow]) -> None:
        """Undoes `pin`."""
        for row in rows:
            self._pins[row] -= 1
            if not self._pins[row] and row in self._doomed:
                self._doomed.remove(row)
                self.free((row,))

    def take(self) -> tuple[TierMove, ...]:
        """The moves that the step which is built now must carry."""
        moves, self._next = self._next, _Moves()
        self._in_flight.append(moves)
        self.pin(moves.stores)
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
            self._unready.difference_update(moves.stores)
            self.num_stored += len(moves.stores)
            self.num_loaded += len(moves.loads)
            self._pool.release(tuple(moves.loads))
            self.free(moves.loads.values())
        self.unpin(moves.stores)

    def leaving(self) -> set[BlockId]:
        """Blocks that steps in flight move out."""
        return {block for moves in self._in_flight for block in moves.stores.values()}

    def abandon_stores(self, blocks: Iterable[BlockId]) -> None:
        """These are to be written by others than steps: moves out of them that no step has taken are not made."""
        wanted = set(blocks)
        if self._next.stores and not wanted.isdisjoint(self._next.stores.values()):
            self._next.stores = {row: block for row, block in self._next.stores.items() if block not in wanted}

    def idle_loads(self) -> list[BlockId]:
        """Blocks that are to be loaded by the next step, and that nobody waits for any more."""
        return [block for block in self._next.loads if self._pool.ref_count(block) == 1]

    def abandon_loads(self, blocks: Iterable[BlockId]) -> None:
        """These `idle_loads` are not made: they are nobody's, and without content."""
        for block in blocks:
            row = self._next.loads.pop(block)
            self._pool.release((block,))
            self.free((row,))

    def check_rows(self, known: Sequence[HostRow]) -> None:
        """`known`: rows that somebody counts on. Raises InternalError unless all others but those in use are free."""
        in_use = {row for moves in (self._next, *self._in_flight) for row in moves.loads.values()} | self._doomed
        if len(set(known)) != len(known) or not in_use.isdisjoint(known):
            raise InternalError("a row of the host tier is in two places")
        if self._tier.num_free + len(known) + len(in_use) != self._tier.num_rows:
            raise InternalError(f"rows were lost: {self._tier.num_free} free, {len(known)} known, {len(in_use)} in use")


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
        """A step computed so many tokens of prompts, perhaps beside others."""
        newest = seconds / num_tokens
        self._token_s = newest if self._token_s is None else self._token_s + _WEIGHT * (newest - self._token_s)
