"""What prefix caches hold, as far as this router knows, by worker and by block; and how a request asks for it.

    reported   what the worker has said: exact, but for what is on its way
    expected   what this router sent there and the worker has not said yet; forgotten after a while

Blocks go by the names of `shell.prefix_hash`. A cache that holds a block holds all blocks before it, so the longest
match is found by halving. A wrong answer costs time and never a token: workers compare tokens. Time is given.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from router.worker_set import WorkerSet
from shell.prefix_hash import block_hashes, salt_hash
from tandem.types import TokenId

MAX_REPORTED = 1 << 20
MAX_EXPECTED = 1 << 16
"""Names kept of one worker; what comes beyond them is not taken in, or the oldest expectation is dropped."""
EXPECT_S = 30.0
"""Time within which a worker computes a prompt and reports its blocks."""
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
            tokens = array("I", self._token_ids[start : start + step]).tobytes()
            hashes += block_hashes(hashes[-1], tokens, block_size)
        self._hashes[block_size] = hashes[1:]

    def hashes(self, block_size: int) -> Sequence[int]:
        """Returns the hashes of the full blocks; empty if `name_blocks` was not awaited for this size."""
        return self._hashes.get(block_size, ())

    def most_tokens(self, block_size: int) -> int:
        """Most tokens that a cache can spare: a last token is always computed."""
        return (len(self._token_ids) - 1) // block_size * block_size


class _Holders:
    """By name of a block: who holds it. One worker alone is kept as its number inverted, which takes less memory."""

    def __init__(self) -> None:
        self._sets: dict[int, int] = {}

    def __getitem__(self, name: int) -> WorkerSet:
        held = self._sets.get(name, 0)
        return held if held >= 0 else 1 << ~held

    def add(self, name: int, number: int) -> None:
        """Idempotent."""
        self._put(name, self[name] | 1 << number)

    def discard(self, name: int, number: int) -> None:
        """Idempotent."""
        self._put(name, self[name] & ~(1 << number))

    def _put(self, name: int, workers: WorkerSet) -> None:
        if not workers:
            self._sets.pop(name, None)
        elif workers & (workers - 1):
            self._sets[name] = workers
        else:
            self._sets[name] = ~(workers.bit_length() - 1)


class PrefixIndex:
    """Index over all workers of a router: who holds a block. The workers' maps keep the index."""

    def __init__(self) -> None:
        self.reported = _Holders()
        self.expected = _Holders()
        self.num_telling = 0
        """Number of workers that report their holdings."""
        self.due: deque[tuple[float, PrefixMap, Sequence[int]]] = deque()
        """When expectations end, the next ones first."""

    def held(self, prefix: Prefix, block_sizes: Collection[int], now_s: float) -> HeldOf:
        """Returns who holds how much of a prefix."""
        while self.due and self.due[0][0] <= now_s:
            _, of, names = self.due.popleft()
            of.expire(names, now_s)
        return HeldOf(self, prefix, block_sizes)


class HeldOf:
    """Who holds how much of one prompt; for as long as nothing changes."""

    def __init__(self, index: PrefixIndex, prefix: Prefix, block_sizes: Collection[int]) -> None:
        self._index = index
        self._prefix = prefix
        self._levels = {
            size: self._levels_of(prefix.hashes(size)[: prefix.most_tokens(size) // size]) for size in block_sizes
        }
        """By block size: sets of workers that hold a number of blocks at least, with that number; the largest first."""

    def most(self, among: WorkerSet) -> WorkerSet:
        """Who of them seems to hold the most of it, if anybody holds any."""
        most, found = 0, 0
        for size, levels in self._levels.items():
            for num_blocks, holders in reversed(levels):
                if holders & among:
                    if size * num_blocks >= most:
                        found = holders & among | (found if size * num_blocks == most else 0)
                        most = size * num_blocks
                    break
        return found

    def reported(self, num_tokens: int, among: WorkerSet) -> WorkerSet:
        """Who of them has said that it holds at least so many tokens, which are more than 0."""
        found = 0
        for size in self._levels:
            hashes, num_blocks = self._prefix.hashes(size), -(-num_tokens // size)
            if num_blocks <= min(len(hashes), self._prefix.most_tokens(size) // size):
                found |= self._index.reported[hashes[num_blocks - 1]]
        return found & among

    def _levels_of(self, hashes: Sequence[int]) -> list[tuple[int, WorkerSet]]:
        """Who holds a block holds those before it: the sets shrink, and where one ends is found by halving."""
        levels: list[tuple[int, WorkerSet]] = []
        end = 0
        while end < len(hashes) and (holders := self._holders(hashes[end])):
            end = self._end_of(hashes, end, holders)
            levels.append((end, holders))
        return levels

    def _end_of(self, hashes: Sequence[int], start: int, holders: WorkerSet) -> int:
        """Returns the number of the first block after `start` that other workers hold."""
        return bisect_left(hashes, True, lo=start + 1, key=lambda name: self._holders(name) != holders)

    def _holders(self, name: int) -> WorkerSet:
        return self._index.reported[name] | self._index.expected[name]


class PrefixMap:
    """Map of one worker, from the start of its stream to the end."""

    def __init__(self) -> None:
        self.tells = False
        """Whether the worker says what it holds. Of one that does not, nothing is expected."""
        self._reported: set[int] = set()
        self._expected: dict[int, float] = {}
        """Until when, the oldest first."""
        self._index = PrefixIndex()
        self._number = 0

    def join(self, index: PrefixIndex, number: int) -> None:
        """From now on, `index` has what this worker holds under its number. To be called once, before it tells any."""
        assert not self.tells, "an index is joined before the worker tells anything"
        self._index, self._number = index, number

    def leave(self) -> None:
        """Ends the map of a worker that is gone: another worker may soon get its number."""
        self.forget()
        self._index = PrefixIndex()

    def change(self, stored: Collection[int], removed: Collection[int], *, cleared: bool) -> None:
        """The worker tells of its cache."""
        self._index.num_telling += not self.tells
        self.tells = True
        for name in list(self._reported) if cleared else self._reported.intersection(removed):
            self._reported.remove(name)
            self._index.reported.discard(name, self._number)
        for name in removed:
            self._drop(name)
        for name in stored:
            self._drop(name)
            if len(self._reported) < MAX_REPORTED:
                self._reported.add(name)
                self._index.reported.add(name, self._number)

    def forget(self) -> None:
        """The stream is gone; the next one begins with all that the worker holds."""
        self.change((), (), cleared=True)
        self.tells = False
        self._index.num_telling -= 1
        for name in list(self._expected):
            self._drop(name)

    def expect(self, hashes: Sequence[int], now_s: float) -> None:
        """The worker was given a prompt with these blocks, of which it did not seem to hold the first one."""
        if not self.tells:
            return
        # The last block first: if some are dropped, what is left are the first blocks of a prompt.
        names = [name for name in reversed(hashes) if name not in self._reported]
        for name in names:
            self._expected.pop(name, None)
            self._expected[name] = now_s + EXPECT_S
            self._index.expected.add(name, self._number)
        self._index.due.append((now_s + EXPECT_S, self, names))
        while self._expected and (len(self._expected) > MAX_EXPECTED or next(iter(self._expected.values())) <= now_s):
            self._drop(next(iter(self._expected)))

    def expire(self, names: Iterable[int], now_s: float) -> None:
        """Ends expired expectations of these blocks."""
        for name in names:
            if self._expected.get(name, sys.maxsize) <= now_s:
                self._drop(name)

    def _drop(self, name: int) -> None:
        """Ends the expectation of a block, if any."""
        if self._expected.pop(name, None) is not None:
            self._index.expected.discard(name, self._number)

    def num_reported(self, hashes: Sequence[int]) -> int:
        """How many blocks of this prefix the worker has said that it holds."""
        if not hashes or hashes[0] not in self._reported:
            return 0
        return bisect_left(hashes, True, key=lambda name: name not in self._reported)

    def num_likely(self, hashes: Sequence[int], num_reported: int, now_s: float) -> int:
        """Returns how many blocks the worker has reported (`num_reported`) or was given to compute."""
        if not self._expected:
            return num_reported

        def is_missing(name: int) -> bool:
            return name not in self._reported and self._expected.get(name, now_s) <= now_s

        return bisect_left(hashes, True, lo=num_reported, key=is_missing)
