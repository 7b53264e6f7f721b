"""Finds KV that a pool holds already: a tree over blocks, by their tokens from the start on.

    insert      full blocks whose KV is computed become known to the tree; their holders keep their holds
    acquire     the longest known prefix of a sequence, with a hold on each of its blocks for the caller
    allocate    free blocks, after evicting known ones that nobody holds, least recently used first

Requests see blocks of their own salt only. One token at least is always left to compute, from whose logits the next one
is drawn. All blocks that a worker takes from its pool it takes here. Not thread-safe: the control loop owns it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.block_pool import BlockPool
from tandem.lifecycle import BlockState
from tandem.types import BlockId, TokenId


class PrefixCache:
    """Of one pool. With `enabled` False it knows nothing, and is the pool."""

    def __init__(self, pool: BlockPool, *, enabled: bool = True) -> None:
        self.pool = pool
        self._enabled = enabled
        self._tree: dict[tuple[BlockId | str, bytes], BlockId] = {}
        """A block by its parent (of a first block: the salt) and its tokens. The least recently used first."""

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now: free ones, and known ones that nobody holds."""
        return self.pool.num_free + self.pool.num_cached

    def match(self, cache_salt: str, token_ids: Sequence[TokenId]) -> int:
        """How many leading tokens `acquire` would find: full blocks, at least one token fewer than given."""
        return len(self._find(cache_salt, token_ids)) * self.pool.block_size

    def acquire(self, cache_salt: str, token_ids: Sequence[TokenId], from_block: int = 0) -> tuple[BlockId, ...]:
        """Retains the longest known prefix, without its first `from_block` blocks; the caller releases it."""
        blocks = self._find(cache_salt, token_ids)[from_block:]
        self.pool.retain(blocks)
        return tuple(blocks)

    def insert(self, cache_salt: str, token_ids: Sequence[TokenId], blocks: Sequence[BlockId]) -> None:
        """`blocks`, which the caller holds, have the KV of `token_ids` from the first on; only full ones are taken in.

        A block whose tokens are known in another block stays the caller's alone.
        """
        if not self._enabled:
            return
        parent: BlockId | str = cache_salt
        for key, block in zip(self._keys(token_ids), blocks, strict=False):
            known = self._tree.setdefault((parent, key), block)
            if known == block:
                self.pool.keep((block,))
            parent = known

    def allocate(self, num_blocks: int, state: BlockState = BlockState.LIVE) -> tuple[BlockId, ...]:
        """As `BlockPool.allocate`, after evicting what it takes. Raises PoolExhausted, and evicts nothing then."""
        missing = num_blocks - self.pool.num_free
        if 0 < missing <= self.pool.num_cached:
            self._evict(missing)
        return self.pool.allocate(num_blocks, state)

    def _find(self, cache_salt: str, token_ids: Sequence[TokenId]) -> list[BlockId]:
        blocks: list[BlockId] = []
        parent: BlockId | str = cache_salt
        for key in self._keys(token_ids[: len(token_ids) - 1]):
            known = self._tree.get((parent, key))
            if known is None:
                break
            self._tree[parent, key] = self._tree.pop((parent, key))
            blocks.append(known)
            parent = known
        return blocks

    def _evict(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            parents = {parent for parent, _ in self._tree}
            at, block = next(
                (at, block)
                for at, block in self._tree.items()
                if self.pool.state(block) is BlockState.CACHED and block not in parents
            )
            del self._tree[at]
            self.pool.evict((block,))

    def _keys(self, token_ids: Sequence[TokenId]) -> list[bytes]:
        tokens, size = array("I", token_ids).tobytes(), 4 * self.pool.block_size
        return [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
