"""Takes known blocks out of a prefix tree: to make room in the pool and in the tiers behind it, or for good.

A block goes before those above it, the least recently used leaf first, with one exception. Of two requests that
compute equal blocks at the same time, the tree knows those of the first; what the second adds below them hangs under
blocks that it does not hold. Where only such blocks are left to evict, they go, and what hangs below them is no longer
known, though it stays its holders'.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from engine.block_pool import BlockPool
from engine.disk_slots import DiskSlots
from engine.disk_tier import DiskSlot
from engine.host_rows import HostRows, LoadCosts
from engine.prefix_tree import Node, PrefixTree, Tier
from engine.step import HostRow
from tandem.errors import InternalError
from tandem.lifecycle import BlockState
from tandem.types import BlockId

_AHEAD = 8
"""One row of the host tier in so many is kept free, where there is a disk behind it."""


class Evictor:
    """Of one tree, over a pool and, if there are any, rows of a host tier and slots of a disk tier behind it."""

    def __init__(
        self,
        tree: PrefixTree,
        pool: BlockPool,
        rows: HostRows | None,
        slots: DiskSlots | None,
        costs: LoadCosts,
        on_removed: Callable[[Sequence[int]], None],
    ) -> None:
        """`on_removed` is told the hashes of what is known nowhere any more."""
        self._tree = tree
        self._pool = pool
        self._rows = rows
        self._slots = slots
        self._costs = costs
        self._on_removed = on_removed
        self._num_rows_ahead = 0 if rows is None else -(-rows.num_rows // _AHEAD)
        self.num_evicted = 0
        """Blocks of the pool that were made free."""
        self.in_use = 0
        """Stamp of the newest use: its nodes stay in the host tier."""

    def abandon_loads(self, missing: int) -> int:
        """Takes back blocks that were to be loaded for requests which are gone; returns how many became free."""
        rows = self._rows
        assert rows is not None, "blocks that are to be loaded"
        idle, num_free = set(rows.idle_loads()), self._pool.num_free
        if not idle or missing > self._pool.num_cached + len(idle):
            return 0
        rows.abandon_loads(idle)
        for node in list(self._tree.nodes()):
            if node.parent is not None and node.tier is Tier.DEVICE and not idle.isdisjoint(as_blocks(node.places)):
                self._drop_tail(node, next(at for at, block in enumerate(as_blocks(node.places)) if block in idle))
        return self._pool.num_free - num_free

    def evict(self, num_blocks: int, *, store: bool) -> None:
        """Frees so many blocks at least, all of them CACHED; `store`: they go to the host tier, if that has room."""
        num_blocks -= self.evict_leaves(num_blocks, store=store)
        while num_blocks > 0:
            num_freed = self._evict_above_held()
            self.num_evicted += num_freed
            num_blocks -= num_freed

    def evict_leaves(self, num_blocks: int, *, store: bool) -> int:
        """The same, of blocks with no held ones below them, as far as there are any; returns how many it freed."""
        began, num_freed = self._tree.tick(), 0
        while num_freed < num_blocks:
            leaf = self._tree.least_used(Tier.DEVICE)
            if leaf is None or leaf.last_used > began:  # all have been looked at
                break
            num_unheld = self._num_unheld(leaf, num_blocks - num_freed)
            if num_unheld:
                self._evict_tail(leaf, num_unheld, store=store and self._costs.loading_pays)
                num_freed += num_unheld
            else:
                leaf.last_used = self._tree.tick()  # it is in use now
        self.num_evicted += num_freed
        return num_freed

    def _num_unheld(self, node: Node, at_most: int) -> int:
        """How many of its last blocks nobody holds."""
        return self._pool.num_cached_last(as_blocks(node.places[max(0, len(node.places) - at_most) :]))

    def _evict_tail(self, node: Node, num_blocks: int, *, store: bool) -> None:
        """Evicts its last blocks: into the host tier as far as that has room, the others for good."""
        num_stored = self.make_room(num_blocks) if store else 0
        num_kept = len(node.places) - num_blocks
        if num_stored < num_blocks:
            upper = self._tree.split(node, num_kept + num_stored) if num_kept + num_stored else node
            self.drop(node)
            node = upper
        if num_stored:
            if num_kept:
                self._tree.split(node, num_kept)
            self._store(node)

    def _store(self, node: Node) -> None:
        """Moves a node's CACHED blocks to the host tier, which has room."""
        rows, blocks = self._rows, as_blocks(node.places)
        assert rows is not None, "there is a host tier"
        self._pool.evict(blocks)
        self._tree.move(node, Tier.HOST, array("i", [rows.store(block) for block in blocks]))
        self._tree.merge(node)

    def make_room(self, num_rows: int) -> int:
        """Frees rows of the host tier, least recently used first; returns how many of `num_rows` there are then."""
        if self._rows is None:
            return 0
        while self._rows.num_free < num_rows:
            leaf = self._tree.least_used(Tier.HOST)
            if leaf is None or leaf.last_used >= self.in_use or self._rows.is_pinned(HostRow(leaf.places[-1])):
                break
            self._drop_tail(leaf, max(0, len(leaf.places) - num_rows + self._rows.num_free))
        return min(num_rows, self._rows.num_free)

    def free_rows_ahead(self) -> None:
        """Has blocks of the host tier written to the disk, so that rows are free when the pool's blocks need them.

        A row is free only when it is written: what needs it earlier has the block forgotten.
        """
        rows, slots = self._rows, self._slots
        if rows is None or slots is None:
            return
        while (missing := min(self._num_rows_ahead - rows.num_free - slots.num_writing, slots.num_jobs_left)) > 0:
            leaf = self._tree.least_used(Tier.HOST)
            num_moved = 0 if leaf is None else self._free_slots(rows.num_idle(leaf.places, missing))
            if leaf is None or not num_moved:
                break
            if num_moved < len(leaf.places):
                self._tree.split(leaf, len(leaf.places) - num_moved)
            places = [HostRow(row) for row in leaf.places]
            self._tree.move(leaf, Tier.DISK, array("i", [slots.store(row) for row in places]))
            rows.free(places)
            self._tree.merge(leaf)

    def _free_slots(self, num_slots: int) -> int:
        """Frees slots of the disk tier, least recently used first; returns how many of `num_slots` there are then."""
        slots = self._slots
        assert slots is not None, "there is a disk tier"
        while slots.num_free < num_slots and (leaf := self._tree.least_used(Tier.DISK)) is not None:
            self._drop_tail(leaf, max(0, len(leaf.places) - num_slots + slots.num_free))
        return min(num_slots, slots.num_free)

    def note_disk(self) -> None:
        """Takes note of what the disk has done. What it has lost is known no more."""
        rows, slots = self._rows, self._slots
        if rows is None or slots is None:
            return
        was_broken, unfilled = slots.is_broken, slots.take_done()
        if unfilled:
            for node in list(self._tree.nodes()):
                if node.parent is not None and node.tier is Tier.HOST and not set(unfilled).isdisjoint(node.places):
                    self._drop_tail(node, next(at for at, row in enumerate(node.places) if row in unfilled))
            rows.unpin(unfilled)
        if slots.is_broken and not was_broken:
            for node in list(self._tree.nodes()):
                if node.parent is not None and node.tier is Tier.DISK:
                    self.drop(node)

    def _evict_above_held(self) -> int:
        """Evicts a CACHED block that lies above held ones, of those the last one on its path, and forgets these."""
        for leaf in self._tree.leaves(Tier.DEVICE):
            node: Node | None = leaf
            while node is not None:
                for at in range(len(node.places) - 1, -1, -1):
                    if self._pool.state(BlockId(node.places[at])) is BlockState.CACHED:
                        return self._drop_tail(node, at)
                node = node.parent
        raise InternalError("a CACHED block is not in the tree")

    def _drop_tail(self, node: Node, num_kept: int) -> int:
        """Forgets all blocks of a node but the first ones, and what is below it; returns how many became free."""
        if num_kept:
            self._tree.split(node, num_kept)
        return self.drop(node)

    def drop(self, node: Node) -> int:
        """Forgets a node and all below it; returns how many blocks of the pool became free."""
        num_free = self._pool.num_free
        for each in self._tree.remove(node):
            self.free_places(each)
            if each.hashes:
                self._on_removed(each.hashes)
        return self._pool.num_free - num_free

    def free_places(self, node: Node) -> None:
        """Nothing is known of a node's places any more; held blocks stay their holders'."""
        if node.tier is Tier.DEVICE:
            cached, held = self._pool.cached_and_held(as_blocks(node.places))
            if held:
                self._pool.forget(held)
            self._pool.evict(cached)
        elif node.tier is Tier.HOST and self._rows is not None:
            self._rows.free(HostRow(row) for row in node.places)
        elif self._slots is not None:
            self._slots.free(as_slots(node.places))


def as_blocks(places: Iterable[int]) -> Sequence[BlockId]:
    """Places of the device tier are blocks of the pool."""
    return cast("Sequence[BlockId]", places)


def as_slots(places: Iterable[int]) -> Sequence[DiskSlot]:
    """Places of the disk tier are slots of its file."""
    return cast("Sequence[DiskSlot]", places)
