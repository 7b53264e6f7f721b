"""Gives the blocks of a prefix tree their hashes (`shell.prefix_hash`), and announces each hashed block to a listener.

A few are hashed at once. Many, as of a long prompt, are hashed in pieces on the running loop, between which other work
gets its turn: until then these blocks are known, but not announced. A block that has gone meanwhile never is.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Protocol, cast

from engine.prefix_tree import TOKEN_BYTES, Node, PrefixTree
from shell.prefix_hash import block_hashes, salt_hash
from tandem.types import TokenId

PIECE = 2048
"""Blocks that are hashed and announced at a time: about a millisecond."""


class CacheListener(Protocol):
    """Told what a cache holds. Blocks by their hashes (`shell.prefix_hash`); called on the loop, must not raise."""

    def stored(
        self, cache_salt: str, parent_hash: int | None, hashes: Sequence[int], token_ids: Sequence[TokenId]
    ) -> None:
        """Blocks that follow each other, the first block behind `parent_hash`; None = at the root."""

    def removed(self, hashes: Sequence[int]) -> None:
        """Blocks of these hashes are held nowhere on this worker from now on."""

    def cleared(self) -> None:
        """Nothing is held from now on."""


class BlockNames:
    """Hashes of a tree's blocks, while there is a listener.

    INVARIANT: no node has hashes unless those above it have all of theirs.
    """

    def __init__(self, tree: PrefixTree, block_size: int, listener: CacheListener | None) -> None:
        self.listener = listener
        self._tree = tree
        self._block_size = block_size

    def added(self, node: Node) -> None:
        """The last blocks of a node have no hashes yet."""
        if self.listener is None:
            return
        unnamed = self._tree.unnamed
        unnamed.append(node)
        if len(unnamed) > 1:
            return  # its turn will come
        if len(node.places) - len(node.hashes) <= PIECE:
            self._name_next()
        else:
            self._name_soon()

    def _name_soon(self) -> None:
        try:
            asyncio.get_running_loop().call_soon(self._name_in_turn)
        except RuntimeError:  # no loop runs, so nobody waits for a turn
            while self._tree.unnamed:
                self._name_next()

    def _name_in_turn(self) -> None:
        if self._tree.unnamed:
            self._name_next()
        if self._tree.unnamed:
            self._name_soon()

    def _name_next(self) -> None:
        """Names a piece of the oldest node, or of the nodes above."""
        oldest = self._tree.unnamed[0]
        if oldest.parent is not None and oldest.lacks_names:
            self._name(_first_that_lacks(oldest))
        if oldest.parent is None or not oldest.lacks_names:
            self._tree.unnamed.popleft()

    def _name(self, node: Node) -> None:
        assert node.parent is not None, "a node in the tree"
        size, start = self._block_size * TOKEN_BYTES, len(node.hashes)
        before = node.hashes or node.parent.hashes
        above, cache_salt = before[-1] if before else None, self._tree.salt_of(node)
        tokens = node.edge[start * size : (start + PIECE) * size]
        first = salt_hash(cache_salt) if above is None else above
        hashes = array("Q", block_hashes(first, tokens, self._block_size))
        node.hashes += hashes
        if self.listener is not None:
            self.listener.stored(cache_salt, above, hashes, cast("Sequence[TokenId]", array("I", tokens)))


def _first_that_lacks(node: Node) -> Node:
    """From the root on, down to this one: hashes are made of those above them."""
    while node.parent is not None and node.parent.lacks_names:
        node = node.parent
    return node
