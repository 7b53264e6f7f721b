"""A compressed radix tree of token runs, in whole blocks: which places hold the KV of which tokens.

    root of a salt ─┬─ edge "AAAABBBB" [block 4, block 7] ─┬─ edge "CCCC" [block 2]
                    └─ …                                   └─ edge "DDDDEEEE" [row 0, row 3]

After RadixAttention (arXiv 2312.07104). An edge is a run of tokens as bytes, 4 per token, so that comparing is memcmp;
children are found by their first block. All blocks of a node lie in one tier, and those of its children in the same
or a later one. Knows tokens and places only: who holds a block, and what moves, is the cache's.
"""

from __future__ import annotations

import enum
import heapq
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from tandem.types import TokenId

TOKEN_BYTES = 4
_MERGED_BYTES = 1 << 14
"""Longest edge that `merge` copies; without it, blocks that are evicted one by one would each stay a node."""


class Tier(enum.IntEnum):
    """Where blocks lie; a child's tier is never before its parent's."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Node:
    """A run of blocks. Changed by the tree, and by the cache that owns it."""

    __slots__ = ("children", "edge", "hashes", "last_used", "num_peers", "parent", "places", "tier")

    def __init__(
        self, parent: Node | None, edge: bytes, places: array[int], tier: Tier, hashes: array[int], last_used: int
    ) -> None:
        self.parent = parent
        """None: a root, or taken out of the tree."""
        self.edge = edge
        """Tokens of all its blocks."""
        self.places = places
        """One for each block: ids of pool blocks, rows or slots, as `tier` says."""
        self.tier = tier
        self.hashes = hashes
        """One for each block (`shell.prefix_hash`), the last ones a little later; none at all without a listener."""
        self.last_used = last_used
        """On the tree's counter; a parent's is not smaller."""
        self.children: dict[bytes, Node] = {}
        """By their first block's tokens."""
        self.num_peers = 0
        """Children in its own tier."""

    @property
    def is_leaf(self) -> bool:
        """Whether it is in the tree, and no child lies in its own tier."""
        return self.parent is not None and not self.num_peers

    @property
    def lacks_names(self) -> bool:
        """Whether some of its blocks have no hash."""
        return len(self.hashes) < len(self.places)


class PrefixTree:
    """A tree with a root for each salt that has blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = TOKEN_BYTES * block_size
        self._roots: dict[str, Node] = {}
        self._salts: dict[Node, str] = {}
        """Salts of the roots."""
        self._queues = tuple(LeafQueue(tier) for tier in Tier)
        self.unnamed: deque[Node] = deque()
        """Nodes that are to get hashes (`BlockNames`). None are merged meanwhile."""
        self.now = 0
        """Counts walks that use what they find, and searches for what to evict: the order of uses."""

    def tick(self) -> int:
        """The next value of `now`."""
        self.now += 1
        return self.now

    def walk(self, cache_salt: str, token_ids: Sequence[TokenId], end: int) -> list[tuple[Node, int]]:
        """Nodes along the first `end` tokens, each with how many of its blocks match: all, but in the last one.

        Of an `array` of tokens no more is copied than what matches: a copy of many megabytes takes milliseconds.
        """
        path: list[tuple[Node, int]] = []
        node, offset, size = self._roots.get(cache_salt), 0, self._block_bytes
        if node is None:
            return path
        tokens = view_of(token_ids, end)
        while (child := node.children.get(tokens[offset : offset + size].tobytes())) is not None:
            node = child
            if tokens[offset : offset + len(node.edge)].tobytes() != node.edge:
                path.append((node, self._num_equal(node.edge, tokens, offset)))
                break
            path.append((node, len(node.places)))
            offset += len(node.edge)
        return path

    def add(self, cache_salt: str, parent: Node | None, edge: bytes, places: array[int]) -> Node:
        """Device blocks without hashes below `parent`, or below the salt's root, where none begins with the same block.

        Returns the node that has them: a new one, or `parent`.
        """
        if parent is None:
            parent = self._root(cache_salt)
        elif parent.parent is not None and not parent.children and parent.tier is Tier.DEVICE:
            parent.edge += edge  # a prompt that comes in chunks makes one node
            parent.places += places
            return parent
        node = Node(parent, edge, places, Tier.DEVICE, array("Q"), self.now)
        parent.children[edge[: self._block_bytes]] = node
        parent.num_peers += 1
        self._queues[Tier.DEVICE].add(node)
        return node

    def move(self, node: Node, tier: Tier, places: array[int]) -> None:
        """Its blocks now lie elsewhere: a leaf in a later tier, or what lies below an earlier tier in one before
        its own that keeps the order.
        """
        parent = node.parent
        assert parent is not None, "a node in the tree"
        parent.num_peers += (parent.tier is tier) - (parent.tier is node.tier)
        node.tier, node.places = tier, places
        node.num_peers = sum(child.tier is tier for child in node.children.values())
        for each in (node, parent):
            if each.is_leaf:
                self._queues[each.tier].add(each)

    def split(self, node: Node, num_blocks: int) -> Node:
        """Puts a node of its first `num_blocks` blocks above it and returns that; `node` keeps the others."""
        assert node.parent is not None, "a node in the tree"
        assert 0 < num_blocks < len(node.places), "a split inside a node"
        cut, size = num_blocks * self._block_bytes, self._block_bytes
        upper = Node(
            node.parent, node.edge[:cut], node.places[:num_blocks], node.tier, node.hashes[:num_blocks], node.last_used
        )
        node.parent.children[upper.edge[:size]] = upper
        node.edge, node.places, node.hashes = node.edge[cut:], node.places[num_blocks:], node.hashes[num_blocks:]
        node.parent, upper.num_peers = upper, 1
        upper.children[node.edge[:size]] = node
        if self.unnamed and upper.lacks_names:
            self.unnamed.append(upper)  # `node` may go before it
        return upper

    def merge(self, node: Node) -> None:
        """Takes the blocks of its only child into a node, if that lies in the same tier and is short."""
        if len(node.children) != 1 or not node.num_peers or self.unnamed:
            return
        (child,) = node.children.values()
        if len(child.edge) > _MERGED_BYTES:
            return
        for each in child.children.values():
            each.parent = node
        node.children, node.num_peers, child.parent = child.children, child.num_peers, None
        node.edge, node.places, node.hashes = (
            node.edge + child.edge,
            node.places + child.places,
            node.hashes + child.hashes,
        )
        node.last_used = max(node.last_used, child.last_used)
        if node.is_leaf:
            self._queues[node.tier].add(node)

    def remove(self, node: Node) -> list[Node]:
        """Takes out a node and all below it, and returns them; a root goes with its last child."""
        parent = node.parent
        assert parent is not None, "a node in the tree"
        del parent.children[node.edge[: self._block_bytes]]
        parent.num_peers -= parent.tier is node.tier
        parent.last_used = max(parent.last_used, node.last_used)
        if parent.parent is None and not parent.children:
            del self._roots[self._salts.pop(parent)]
        elif parent.is_leaf:
            self._queues[parent.tier].add(parent)
        removed = [node]
        for each in removed:
            removed.extend(each.children.values())
            each.parent = None
        return removed

    def least_used(self, tier: Tier) -> Node | None:
        """The leaf of a tier that was not used for longest."""
        return self._queues[tier].least()

    def leaves(self, tier: Tier) -> Iterator[Node]:
        """Yields the leaves of a tier, in no order. The tree must not change meanwhile."""
        return (node for node in self._queues[tier] if node.tier is tier and node.is_leaf)

    def nodes(self) -> Iterator[Node]:
        """All, parents before children."""
        above = list(self._roots.values())
        while above:
            children = list(above.pop().children.values())
            above += children
            yield from children

    def salt_of(self, node: Node) -> str:
        """Returns the salt of a node in the tree."""
        while node.parent is not None:
            node = node.parent
        return self._salts[node]

    def _root(self, cache_salt: str) -> Node:
        root = self._roots.get(cache_salt)
        if root is None:
            root = self._roots[cache_salt] = Node(None, b"", array("i"), Tier.DEVICE, array("Q"), 0)
            self._salts[root] = cache_salt
        return root

    def _num_equal(self, edge: bytes, tokens: memoryview, offset: int) -> int:
        """How many of an edge's leading blocks are those at `offset`, by bisection: each look is a memcmp."""
        size = self._block_bytes
        low, high = 0, min(len(edge), len(tokens) - offset) // size
        while low < high:
            middle = (low + high + 1) // 2
            if edge[low * size : middle * size] == tokens[offset + low * size : offset + middle * size].tobytes():
                low = middle
            else:
                high = middle - 1
        return low


class LeafQueue:
    """Leaves of one tier, least recently used first. Who uses a node writes `last_used`; the queue finds out late."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._number = count()

    def add(self, node: Node) -> None:
        """Adds a node; a no-op for a queued node."""
        if node not in self._queued:
            self._queued.add(node)
            heapq.heappush(self._heap, (node.last_used, next(self._number), node))

    def least(self) -> Node | None:
        """Returns the first leaf, which stays in the queue. Nodes that are no longer leaves are dropped on the way."""
        while self._heap:
            last_used, number, node = self._heap[0]
            if node.tier is not self._tier or not node.is_leaf:
                heapq.heappop(self._heap)
                self._queued.remove(node)
            elif node.last_used != last_used:
                heapq.heapreplace(self._heap, (node.last_used, number, node))
            else:
                return node
        return None

    def __iter__(self) -> Iterator[Node]:
        return (node for *_, node in self._heap)


def view_of(token_ids: Sequence[TokenId], end: int) -> memoryview:
    """The first `end` tokens as bytes, as edges hold them; an `array` of C unsigned ints is not copied."""
    tokens = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids[:end])
    return memoryview(tokens).cast("B")[: end * TOKEN_BYTES]
