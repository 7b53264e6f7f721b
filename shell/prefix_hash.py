"""Names of blocks of KV by what was computed in them, the same on every worker and router.

A block's hash is of its own tokens and, as the seed, the hash of the block before it; the first one's seed is the hash
of the salt. So equal hashes mean equal tokens from the start on, unless somebody made them collide: a router uses them
to guess where KV lies, and a worker compares the tokens themselves.
"""

from __future__ import annotations

import xxhash


def salt_hash(cache_salt: str) -> int:
    """Returns the hash that precedes the first block's."""
    return xxhash.xxh3_64_intdigest(cache_salt.encode())


def block_hashes(parent: int, tokens: bytes, block_size: int) -> list[int]:
    """Returns a hash of 64 bits for each full block of `block_size` tokens that follow the block named `parent`.

    `tokens`: 4 bytes each, in this machine's order, as of `array("I", token_ids).tobytes()`.
    """
    view, size = memoryview(tokens), 4 * block_size
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = xxhash.xxh3_64_intdigest(view[start : start + size], seed=parent)
        hashes.append(parent)
    return hashes
