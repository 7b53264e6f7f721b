"""What one worker's prefix cache holds, as far as this router knows; and how a request asks for it.

    reported   what the worker has said: exact, but for what is on its way
    expected   what this router sent there and the worker has not said yet; forgotten after a while

Blocks go by the names of `tandem.prefix_hash`. A cache that holds a block holds all blocks before it, so the longest
match is found by halving. A wrong answer costs time and never a token: workers compare tokens. Time is given.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Collection, Sequence

from tandem.prefix_hash import chained_hashes, salt_hash
from tandem.types import TokenId

MAX_REPORTED = 1 << 20
MAX_EXPECTED = 1 << 16
"""Names kept of one worker; what comes beyond them is not taken in, or the oldest expectation is dropped."""
EXPECT_S = 30.0
"""By then a prompt should be computed, and the worker have said so."""
_BLOCKS_AT_ONCE = 1024
"""Named before others on the loop get their turn: about half a millisecond."""


class Prefix:
    """The tokens that a request begins with. Their full blocks are named once per block size."""

    def __init__(self, cache_salt: str, token_ids: Sequence[TokenId]) -> None:
        self._cache_salt = cache_salt
        self._token_ids = token_ids
        self._hashes: dict[int, list[int]] = {}

    async def name_blocks(self, block_size: int) -> None:
        """A no-op for a size that is done."""
        if block_size in self._hashes:
            return
        hashes = [salt_hash(self._cache_salt)]
        step = _BLOCKS_AT_ONCE * block_size
        for start in range(0, len(self._token_ids), step):
            if start:
                await asyncio.sleep(0)
            hashes += chained_hashes(hashes[-1], self._token_ids[start : start + step], block_size)
        self._hashes[block_size] = hashes[1:]

    def hashes(self, block_size: int) -> Sequence[int]:
        """Of its full blocks; empty if `name_blocks` was not awaited for this size."""
        return self._hashes.get(block_size, ())

    def most_tokens(self, block_size: int) -> int:
        """That a cache can spare: one token is always left to compute."""
        return (len(self._token_ids) - 1) // block_size * block_size


class PrefixMap:
    """Of one worker, from the start of its stream to the end."""

    def __init__(self) -> None:
        self.tells = False
        """Whether the worker says what it holds. Of one that does not, nothing is expected."""
        self._reported: set[int] = set()
        self._expected: dict[int, float] = {}
        """Until when, the oldest first."""

    def change(self, stored: Collection[int], removed: Collection[int], *, cleared: bool) -> None:
        """The worker tells of its cache."""
        self.tells = True
        if cleared:
            self._reported.clear()
        self._reported.difference_update(removed)
        for name in removed:
            self._expected.pop(name, None)
        for name in stored:
            self._expected.pop(name, None)
            if len(self._reported) < MAX_REPORTED:
                self._reported.add(name)

    def forget(self) -> None:
        """The stream is gone; the next one begins with all that the worker holds."""
        self.tells = False
        self._reported.clear()
        self._expected.clear()

    def expect(self, hashes: Sequence[int], now_s: float) -> None:
        """The worker was given a prompt with these blocks, of which it did not seem to hold the first one."""
        if not self.tells:
            return
        # The last block first: if some are dropped, what is left are the first blocks of a prompt.
        for name in reversed(hashes):
            if name not in self._reported:
                self._expected.pop(name, None)
                self._expected[name] = now_s + EXPECT_S
        while self._expected and (len(self._expected) > MAX_EXPECTED or next(iter(self._expected.values())) <= now_s):
            del self._expected[next(iter(self._expected))]

    def num_reported(self, hashes: Sequence[int]) -> int:
        """How many blocks of this prefix the worker has said that it holds."""
        if not hashes or hashes[0] not in self._reported:
            return 0
        return bisect_left(hashes, True, key=lambda name: name not in self._reported)

    def num_likely(self, hashes: Sequence[int], num_reported: int, now_s: float) -> int:
        """The same, with those that it was given to compute. `num_reported`: what that says of them."""
        if not self._expected:
            return num_reported

        def is_missing(name: int) -> bool:
            return name not in self._reported and self._expected.get(name, now_s) <= now_s

        return bisect_left(hashes, True, lo=num_reported, key=is_missing)
