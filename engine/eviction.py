"""Takes known blocks out of a prefix tree: to make room in the pool and in the tiers behind it, or to forget them.

A block goes before those above it, the least recently used leaf first, with one exception. Of two requests that
compute equal blocks at the same time, the tree knows those of the first; what the second adds below them hangs under
blocks that it does not hold. Where only such blocks are left to evict, they go, and what hangs below them is no longer
known, though it stays its holders'.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from typing import cast

from engine.block_pool import BlockPool
from engine.cache_counters import CacheCounters
from engine.disk_copies import DiskCopies
from engine.host_moves import HostMoves, LoadCosts
from engine.prefix_tree import Node, PrefixTree, Tier
from tandem.errors import InternalError
from tandem.lifecycle import BlockState
from tandem.types import BlockId

_AHEAD = 8
"""One row of the host tier in eight is kept free, where there is a disk behind it."""


class Evictor:
    """Evicts from a tree, over a pool and the tiers behind that pool."""

    def __init__(
        self,
        tree: PrefixTree,
        pool: BlockPool,
        host: HostMoves,
        disk: DiskCopies,
        costs: LoadCosts,
        counters: CacheCounters,
        on_removed: Callable[[Sequence[int]], None],
    ) -> None:
        """`on_removed` is called with the hashes of blocks that became known nowhere."""
        self._tree = tree
        self._pool = pool
        self._host = host
        self._disk = disk
        self._costs = costs
        self._counters = counters
        self._on_removed = on_removed
        self._num_rows_ahead = -(-host.rows.num_rows // _AHEAD) if disk.slots.num_rows else 0
        self.in_use = 0
        """Stamp of the newest use: its nodes stay in the host tier."""

    def abandon_loads(self, missing: int) -> int:
        """Takes back blocks that were to be loaded for requests which are gone; returns how many became free."""
        idle, num_free = set(self._host.idle_loads()), self._pool.num_free
        if not idle or missing > self._pool.num_cached + len(idle):
            return 0
        self._host.abandon_loads(idle)
        self._forget_from(Tier.DEVICE, idle)
        return self._pool.num_free - num_free

    def evict(self, num_blocks: int, *, store: bool) -> None:
        """Frees `num_blocks` CACHED blocks at least; `store`: they go to the host tier, if that has room."""
        num_blocks -= self.evict_leaves(num_blocks, store=store)
        while num_blocks > 0:
            num_freed = self._evict_above_held()
            self._counters.evicted_blocks += num_freed
            num_blocks -= num_freed

    def evict_leaves(self, num_blocks: int, *, store: bool) -> int:
        """Evicts only blocks with no held blocks below; returns how many became free."""
        began, num_freed = self._tree.tick(), 0
        while num_freed < num_blocks:
            leaf = self._tree.least_used(Tier.DEVICE)
            if leaf is None or leaf.last_used > began:  # all have been looked at
                break
            last = leaf.places[max(0, len(leaf.places) - num_blocks + num_freed) :]
            num_unheld = self._pool.num_cached_last(as_blocks(last))
            if num_unheld:
                self._evict_tail(leaf, num_unheld, store=store and self._costs.loading_pays)
                num_freed += num_unheld
            else:
                leaf.last_used = self._tree.tick()  # it is in use now
        self._counters.evicted_blocks += num_freed
        return num_freed

    def _evict_tail(self, node: Node, num_blocks: int, *, store: bool) -> None:
        """Evicts the node's last blocks: into the host tier as far as that has room, and forgets the others."""
        num_stored = self.make_room(num_blocks) if store else 0
        num_kept = len(node.places) - num_blocks
        if num_stored < num_blocks:
            upper = self._tree.split(node, num_kept + num_stored) if num_kept + num_stored else node
            self.drop(node)
            node = upper
        if num_stored:
            if num_kept:
                self._tree.split(node, num_kept)
            blocks = as_blocks(node.places)
            self._pool.evict(blocks)
            self._tree.move(node, Tier.HOST, array("i", [self._host.store(block) for block in blocks]))
            self._tree.merge(node)

    def make_room(self, num_rows: int, tier: Tier = Tier.HOST) -> int:
        """Frees rows of a tier, least recently used first; returns how many of `num_rows` there are then."""
        rows = self._disk.slots if tier is Tier.DISK else self._host.rows
        while rows.num_free < num_rows:
            leaf = self._tree.least_used(tier)
            if leaf is None or leaf.last_used >= self.in_use or rows.is_pinned(leaf.places[-1]):
                break
            self._drop_tail(leaf, max(0, len(leaf.places) - num_rows + rows.num_free))
        return min(num_rows, rows.num_free)

    def free_rows_ahead(self) -> None:
        """Has blocks of the host tier written to the disk, so that rows are free when the pool's blocks need them.

        A row is free only when it is written: what needs it earlier has the block forgotten.
        """
        host, disk = self._host, self._disk
        while (missing := min(self._num_rows_ahead - host.rows.num_free - disk.num_writing, disk.num_jobs_left)) > 0:
            leaf = self._tree.least_used(Tier.HOST)
            num_idle = 0 if leaf is None else host.rows.num_idle(leaf.places, missing)
            num_moved = self.make_room(num_idle, Tier.DISK)
            if leaf is None or not num_moved:
                break
            if num_moved < len(leaf.places):
                self._tree.split(leaf, len(leaf.places) - num_moved)
            rows = leaf.places
            self._tree.move(leaf, Tier.DISK, array("i", [disk.store(row) for row in rows]))
            host.free(rows)
            self._tree.merge(leaf)

    def note_disk(self) -> None:
        """Notes what the disk has done: blocks that the disk has lost are forgotten."""
        was_off, unfilled = self._disk.is_off, self._disk.take_done()
        if unfilled:
            self._forget_from(Tier.HOST, set(unfilled))
            self._host.rows.unpin(unfilled)
        if self._disk.is_off and not was_off:
            self._forget_from(Tier.DISK, range(self._disk.slots.num_rows))

    def _forget_from(self, tier: Tier, lost: Container[int]) -> None:
        """Forgets each node of a tier from its first lost place on, and what is below it."""
        for node in list(self._tree.nodes()):
            if node.parent is not None and node.tier is tier:
                at = next((at for at, place in enumerate(node.places) if place in lost), None)
                if at is not None:
                    self._drop_tail(node, at)

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
        """Forgets a node's places; held blocks stay their holders'."""
        if node.tier is Tier.DEVICE:
            cached, held = self._pool.cached_and_held(as_blocks(node.places))
            if held:
                self._pool.forget(held)
            self._pool.evict(cached)
        elif node.tier is Tier.HOST:
            self._host.free(node.places)
        else:
            self._disk.slots.free(node.places)


def as_blocks(places: Iterable[int]) -> Sequence[BlockId]:
    """Places of the device tier are blocks of the pool."""
    return cast("Sequence[BlockId]", places)
