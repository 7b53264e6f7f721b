"""Names of blocks of KV by what was computed in them, the same on every worker and router.

A block's hash is of its own tokens and, as the seed, the hash of the block before it; the first one's seed is the hash
of the salt. So equal hashes mean equal tokens from the start on, unless somebody made them collide: a router uses them
to guess where KV lies, and a worker compares the tokens themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from tandem.types import TokenId


def salt_hash(cache_salt: str) -> int:
    """Returns the hash that precedes the first block's."""
    return xxhash.xxh3_64_intdigest(cache_salt.encode())


def block_hashes(cache_salt: str, token_ids: Sequence[TokenId], block_size: int) -> list[int]:
    """Returns a hash of 64 bits for each full block of `block_size` tokens."""
    return chained_hashes(salt_hash(cache_salt), token_ids, block_size)


def chained_hashes(parent: int, token_ids: Sequence[TokenId], block_size: int) -> list[int]:
    """As `block_hashes`, of tokens that follow the block named `parent`."""
    return hashes_below(parent, array("I", token_ids).tobytes(), block_size)


def hashes_below(parent: int, tokens: bytes, block_size: int) -> list[int]:
    """The same; `tokens`: 4 bytes each, in this machine's order."""
    view, size = memoryview(tokens), 4 * block_size
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = xxhash.xxh3_64_intdigest(view[start : start + size], seed=parent)
        hashes.append(parent)
    return hashes
