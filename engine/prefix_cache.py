"""Finds KV that a worker holds already: a radix tree over the blocks of its pool, by their tokens from the start on.

    insert      full blocks whose KV is computed become known; their holders keep their holds
    acquire     the longest known prefix of a sequence, with a hold on each of its blocks for the caller
    allocate    free blocks, after evicting known ones that nobody holds, least recently used first
    prefetch    what lies on disk of the longest known prefix starts to come nearer, for an `acquire` later on
    forget      what was computed from these tokens is not to be trusted

Whoever allocates or retains releases, once per hold. The cache marks LIVE blocks with the pool's `keep`: the last
release then makes them CACHED. A writer copies a block first if others hold the block or a cache counts on its content.
`insert` wants blocks whose step has ended well. Evicted blocks go to the host tier and come back by moves: each step
carries `take_moves()`, and `step_ended` is called for each step in order, before blocks that waited for the step are
released. Moves of a failed step go with the next one; the step behind it fails. Peers may read only the blocks that
`num_loaded` counts. A thread writes the tier behind, on disk; `prefetch` starts a read there, and nothing waits for it.

Requests see blocks of their own salt only. One token at least is always left to compute, from whose logits the next one
is drawn. All blocks that a worker takes from its pool it takes here. Not thread-safe: the control loop owns it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.block_names import BlockNames, CacheListener
from engine.block_pool import BlockPool
from engine.cache_counters import CacheCounters
from engine.disk_copies import Disk, DiskCopies
from engine.eviction import Evictor, as_blocks
from engine.host_moves import HostMoves, LoadCosts
from engine.host_tier import HostTier
from engine.prefix_tree import TOKEN_BYTES, Node, PrefixTree, Tier, view_of
from engine.step import TierMove
from tandem.errors import InternalError
from tandem.lifecycle import BlockState
from tandem.types import BlockId, TokenId

_FREE_SHARE, _MOVES_AHEAD = 16, 16
"""One block in 16 of the pool is kept free for peers to write into; for that, a step moves 16 out at most."""


class PrefixCache:
    """Knows blocks of one pool. With `enabled` False it knows nothing: blocks are free or held."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        enabled: bool = True,
        tier: HostTier | None = None,
        disk: Disk | None = None,
        listener: CacheListener | None = None,
    ) -> None:
        """`tier`: where evicted blocks go, if anywhere; `disk`: where they go from there. The engine's own."""
        self.pool = pool
        self.counters = counters = CacheCounters()
        self._enabled = enabled
        self._tree = PrefixTree(pool.block_size)
        self._names = BlockNames(self._tree, pool.block_size, listener)
        self._host = HostMoves(tier, pool, counters)
        self._disk = DiskCopies(None if tier is None else disk, self._host, counters)
        self._costs = LoadCosts(pool.block_size, 0.0 if tier is None else tier.block_s)
        self._evictor = Evictor(self._tree, pool, self._host, self._disk, self._costs, counters, self._removed)
        self._reserves = False
        """Whether blocks were ever taken for a peer to write into."""

    @property
    def listener(self) -> CacheListener | None:
        """The listener, set before the first insert; without a listener, nothing is hashed."""
        return self._names.listener

    @listener.setter
    def listener(self, listener: CacheListener | None) -> None:
        self._names.listener = listener

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now: free ones, and known ones that nobody holds."""
        return self.pool.num_free - self._host.num_withheld + self.pool.num_cached + len(self._host.idle_loads())

    def match(self, cache_salt: str, token_ids: Sequence[TokenId]) -> int:
        """Returns how many leading tokens `acquire` would find: full blocks, at least one token fewer than given."""
        return sum(num_blocks for _, num_blocks in self._walk(cache_salt, token_ids)) * self.pool.block_size

    def num_held(self, cache_salt: str, token_ids: Sequence[TokenId]) -> int:
        """Returns how many blocks that `acquire` would find have a holder: taking them leaves no less for others."""
        path = self._walk(cache_salt, token_ids)
        found = [as_blocks(node.places[:num_blocks]) for node, num_blocks in path if node.tier is Tier.DEVICE]
        idle = set(self._host.idle_loads())  # `num_available` counts them
        return sum(self.pool.num_held(blocks) - len(idle.intersection(blocks) if idle else ()) for blocks in found)

    def acquire(self, cache_salt: str, token_ids: Sequence[TokenId], from_block: int = 0) -> Sequence[BlockId]:
        """Retains the longest known prefix, without its first `from_block` blocks; the caller releases it.

        An `array`, which a table copies in one go. What lies in the host tier is brought back by the next step, as far
        as there is room for it.
        """
        path, self._evictor.in_use = self._walk(cache_salt, token_ids), self._tree.tick()
        found = array("i")
        for node, num_blocks in path:
            node.last_used = self._evictor.in_use
            if node.tier is Tier.DEVICE:
                found += node.places[:num_blocks]
        self.pool.retain(as_blocks(found))
        for node, num_blocks in path:
            if node.tier is Tier.HOST:
                loaded = self._load(node, num_blocks)
                found += loaded
                if len(loaded) < num_blocks:
                    break
        blocks = found[from_block:]
        if from_block:
            self.pool.release(as_blocks(found[:from_block]))
        self.counters.asked_tokens += max(0, len(token_ids) - from_block * self.pool.block_size)
        self.counters.hit_tokens += len(blocks) * self.pool.block_size
        return as_blocks(blocks)

    def prefetch(self, cache_salt: str, token_ids: Sequence[TokenId]) -> None:
        """Starts to read what lies on disk of the longest known prefix, as far as the host tier has room for it.

        What has arrived when `acquire` is called is found by that; the rest is to be computed.
        """
        if self._disk.is_off or not token_ids or not self._costs.loading_pays:
            return
        self._evictor.note_disk()
        path = self._tree.walk(cache_salt, token_ids, len(token_ids) - 1)
        self._evictor.in_use = self._tree.tick()
        for node, _ in path:
            node.last_used = self._evictor.in_use
        for node, num_blocks in path:
            if node.tier is Tier.DISK and self._read(node, num_blocks) < num_blocks:
                break

    def insert(self, cache_salt: str, token_ids: Sequence[TokenId], blocks: Sequence[BlockId]) -> None:
        """`blocks`, which the caller holds, have the KV of `token_ids` from the first on; only full ones are taken in.

        A block whose tokens are known in another block of the pool stays the caller's alone.
        """
        num_blocks = min(len(blocks), len(token_ids) // self.pool.block_size)
        if not self._enabled or not num_blocks:
            return
        num_tokens = num_blocks * self.pool.block_size
        path, self._evictor.in_use = self._tree.walk(cache_salt, token_ids, num_tokens), self._tree.tick()
        at, num_known = 0, sum(num for _, num in path)
        parent: Node | None = None
        for node, num in path:
            node.last_used = self._evictor.in_use
            is_back = node.tier is not Tier.DEVICE
            parent = node
            if num < len(node.places) and (is_back or num_known < num_blocks):
                parent = self._tree.split(node, num)
            if is_back:
                self._evictor.free_places(parent)
                self._settle(parent, blocks[at : at + num])
            at += num
        if at < num_blocks:
            added = view_of(token_ids, num_tokens)[at * self.pool.block_size * TOKEN_BYTES :].tobytes()
            self.pool.keep(blocks[at:num_blocks])
            self._names.added(self._tree.add(cache_salt, parent, added, array("i", blocks[at:num_blocks])))

    def allocate(self, num_blocks: int, state: BlockState = BlockState.LIVE) -> tuple[BlockId, ...]:
        """Allocates from the pool, after evicting what that takes; see `BlockPool.allocate`. Raises PoolExhausted, and
        evicts nothing then.
        """
        is_reserved = state is BlockState.RESERVED
        num_withheld = self._host.num_withheld if is_reserved else 0
        missing = num_blocks + num_withheld - self.pool.num_free
        if missing > self.pool.num_cached:
            missing -= self._evictor.abandon_loads(missing)
        if 0 < missing <= self.pool.num_cached:
            self._evictor.evict(missing, store=not is_reserved)
        if not is_reserved or not self._host.rows.num_rows:
            return self.pool.allocate(num_blocks, state)
        self._reserves = True
        return self._allocate_reserved(num_blocks, num_withheld)

    def take_moves(self) -> tuple[TierMove, ...]:
        """What the step that is built now must carry. To be called once for each, in the order of their launch."""
        if self._reserves:  # a peer writes at once, so a block for it is moved out ahead of that, or never
            num_ahead = min(_MOVES_AHEAD, self.pool.num_blocks // _FREE_SHARE - self.pool.num_free)
            self._evictor.evict_leaves(num_ahead, store=True)
        self._evictor.note_disk()
        self._evictor.free_rows_ahead()
        return self._host.take()

    def step_ended(self, *, failed: bool, seconds: float = 0.0, num_prompt_tokens: int = 0) -> None:
        """The oldest step that took moves has ended; to be called before what waited for that is released.

        What a failed step should have loaded, the next one loads. `seconds` for `num_prompt_tokens`: what computing
        took.
        """
        self._host.step_ended(failed=failed)
        if not failed and num_prompt_tokens:
            self._costs.computed(num_prompt_tokens, seconds)

    def rest(self) -> None:
        """Notes that no step follows for now: what no request waits for is not loaded, and so holds no blocks."""
        self._evictor.abandon_loads(0)

    def num_loaded(self, blocks: Sequence[BlockId]) -> int:
        """Returns how many of these leading blocks have their content now; a step that took moves brings the others."""
        host = self._host
        if not host.are_loading:
            return len(blocks)
        return next((at for at, block in enumerate(blocks) if host.is_loading(block)), len(blocks))

    def forget(self, cache_salt: str, token_ids: Sequence[TokenId]) -> None:
        """What is known along these tokens, and all that follows it, is known no more; its holders keep it."""
        path = self._tree.walk(cache_salt, token_ids, len(token_ids))
        if path:
            self._evictor.drop(path[0][0])

    def clear(self) -> None:
        """Forgets everything; held blocks stay their holders'."""
        listener, self.listener = self.listener, None
        for node in list(self._tree.nodes()):
            if node.parent is not None:  # else it went with one above it
                self._evictor.drop(node)
        self.listener = listener
        if listener is not None:
            listener.cleared()

    def hashes(self) -> list[int]:
        """Returns the hashes of all known blocks, each behind the one before it; none without a listener.

        The hashes of a long prompt follow a little later (`BlockNames`).
        """
        return [each for node in self._tree.nodes() for each in node.hashes]

    def check_invariants(self) -> None:
        """Recounts everything, pool and rows included. Raises InternalError naming what is broken."""
        self.pool.check_invariants()
        nodes = list(self._tree.nodes())
        known = [BlockId(block) for node in nodes if node.tier is Tier.DEVICE for block in node.places]
        states = [self.pool.state(block) for block in known]
        laws = {
            "a block is in one place": len(set(known)) == len(known),
            "known blocks are LIVE or CACHED": all(
                each in (BlockState.LIVE, BlockState.CACHED) and self.pool.is_shared(block)
                for each, block in zip(states, known, strict=True)
            ),
            "CACHED blocks are known": states.count(BlockState.CACHED) == self.pool.num_cached,
            "a node has as many tokens as blocks": all(
                len(node.edge) == len(node.places) * self.pool.block_size * TOKEN_BYTES for node in nodes
            ),
            "tiers follow each other": all(
                child.tier >= node.tier for node in nodes for child in node.children.values()
            ),
        }
        broken = [name for name, holds in laws.items() if not holds]
        if broken:
            raise InternalError(f"prefix cache: {'; '.join(broken)}")
        self._host.check_rows([row for node in nodes if node.tier is Tier.HOST for row in node.places])
        self._disk.slots.check([slot for node in nodes if node.tier is Tier.DISK for slot in node.places])

    # --- looking and adding ---

    def _walk(self, cache_salt: str, token_ids: Sequence[TokenId]) -> list[tuple[Node, int]]:
        """What `acquire` may take: each node with how many of its blocks; none behind one that takes fewer."""
        if not self._enabled or not token_ids:
            return []
        self._evictor.note_disk()
        path = self._tree.walk(cache_salt, token_ids, len(token_ids) - 1)
        for at, (node, num_blocks) in enumerate(path):
            if node.tier is not Tier.DEVICE:
                is_of_use = node.tier is Tier.HOST and self._costs.loading_pays
                num_ready = self._host.rows.num_ready(node.places[:num_blocks]) if is_of_use else 0
                if num_ready < num_blocks:
                    return [*path[:at], (node, num_ready)]
        return path

    def _load(self, node: Node, num_blocks: int) -> array[int]:
        """Moves a node's leading blocks from the host tier into blocks for the caller, as many as there is room for."""
        num_blocks = min(num_blocks, self.num_available)
        if not num_blocks:
            return array("i")
        blocks = self.allocate(num_blocks)
        if num_blocks < len(node.places):
            node = self._tree.split(node, num_blocks)
        for row, block in zip(node.places, blocks, strict=True):
            self._host.load(row, block)
        self._settle(node, blocks)
        return node.places

    def _read(self, node: Node, num_blocks: int) -> int:
        """Has a node's leading blocks read into rows of the host tier, as far as there is room; how many these are."""
        num_ready = self._disk.slots.num_ready(node.places[:num_blocks])
        num_blocks = self._evictor.make_room(min(num_ready, self._disk.num_jobs_left))
        if num_blocks:
            if num_blocks < len(node.places):
                node = self._tree.split(node, num_blocks)
            self._tree.move(node, Tier.HOST, array("i", [self._disk.load(slot) for slot in node.places]))
        return num_blocks

    def _settle(self, node: Node, blocks: Sequence[BlockId]) -> None:
        """What a node knows lies in these held blocks now."""
        self.pool.keep(blocks)
        self._tree.move(node, Tier.DEVICE, array("i", blocks))

    def _removed(self, hashes: Sequence[int]) -> None:
        if self.listener is not None:
            self.listener.removed(hashes)

    def _allocate_reserved(self, num_blocks: int, num_withheld: int) -> tuple[BlockId, ...]:
        """Blocks that a peer may write into at once: no step is to move them out, or is about to."""
        taken = self.pool.allocate(num_blocks + num_withheld, BlockState.RESERVED)
        leaving = self._host.leaving() if num_withheld else ()
        staying = [block for block in taken if block not in leaving]
        blocks = tuple(staying[:num_blocks])
        self.pool.release([*staying[num_blocks:], *(block for block in taken if block in leaving)])
        self._host.abandon_stores(blocks)
        return blocks
