"""Who holds which KV block: states, reference counts, generations. Knows no tensors and no tokens.

Blocks walk the table `tandem.lifecycle.BLOCK_MOVES`:

    allocate          FREE → LIVE, or FREE → RESERVED for a hand-off
    start_receiving   RESERVED → RECEIVING
    seal              RECEIVING → LIVE        verified whole, the writer has stopped
    release           LIVE → FREE at the last holder, or → CACHED if its content is known · RESERVED → FREE
                      RECEIVING → QUARANTINED, or → FREE if its writer has stopped
    writer_stopped    QUARANTINED → FREE · RECEIVING stays with its holder, never to become LIVE
    retain            CACHED → LIVE; LIVE gets one more holder
    evict             CACHED → FREE

A prefix cache says with `keep` which LIVE blocks' content it knows, finds them again by `retain`, and evicts
what it chooses when blocks run out: `allocate` takes free blocks only.

Each call names its blocks in order and either moves all of them or raises InternalError and
moves none. Not thread-safe: one control loop owns it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from tandem.errors import InternalError, Overloaded
from tandem.lifecycle import BLOCK_MOVES, BlockState, advance
from tandem.types import BlockId, PoolCounts

_STATES = tuple(BlockState)
_FREE, _RESERVED, _RECEIVING, _LIVE, _CACHED, _QUARANTINED = range(len(_STATES))
_ALLOWED = tuple(tuple(to in BLOCK_MOVES[state] for to in _STATES) for state in _STATES)
"""BLOCK_MOVES by number, so that a block's move costs an index and not two hashes."""

_FEW = 8
"""Up to this number, blocks are checked faster one by one than as an array."""


class PoolExhausted(Overloaded):
    """Fewer free blocks than asked for; nothing was allocated."""


class BlockPool:
    """The blocks of one KV cache. Free blocks are reused last in, first out."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InternalError(f"a pool of {num_blocks} blocks of {block_size} tokens")
        self.num_blocks: Final = num_blocks
        """All blocks, free or not."""
        self.block_size: Final = block_size
        """Token slots of a block."""
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._state = bytearray(num_blocks)  # _FREE == 0
        self._ref_count = array("i", bytes(4 * num_blocks))
        self._generation = array("q", bytes(8 * num_blocks))
        self._writer_gone = bytearray(num_blocks)
        self._known = bytearray(num_blocks)
        self._states = np.frombuffer(self._state, np.uint8)
        self._ref_counts = np.frombuffer(self._ref_count, np.int32)
        self._knowns = np.frombuffer(self._known, np.uint8)
        self._generations = np.frombuffer(self._generation, np.int64)
        self._writers_gone = np.frombuffer(self._writer_gone, np.uint8)
        """The same memory: a table of many blocks is looked at and changed in one go."""
        self._order = np.zeros(num_blocks, np.intp)
        """Scratch of `_are_distinct`."""
        self._numbers = np.arange(num_blocks)
        self._num_in_state = [num_blocks, *(0 for _ in _STATES[1:])]

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and `evict` would free."""
        return self._num_in_state[_CACHED]

    def state(self, block: BlockId) -> BlockState:
        """Where the block is now."""
        return _STATES[self._state[block]]

    def generations(self, blocks: Sequence[BlockId]) -> npt.NDArray[np.uint64]:
        """Returns how often each block was allocated; a number that never falls."""
        return self._generations[np.asarray(blocks, np.intp)].astype(np.uint64)

    def ref_count(self, block: BlockId) -> int:
        """Holders of the block; 0 for a free, cached or quarantined block."""
        return self._ref_count[block]

    def num_held(self, blocks: Sequence[BlockId]) -> int:
        """How many of these blocks have a holder."""
        return int(np.count_nonzero(self._ref_counts[np.asarray(blocks, np.intp)]))

    def num_shared(self, blocks: Sequence[BlockId]) -> int:
        """How many of these blocks have several holders."""
        return int(np.count_nonzero(self._ref_counts[np.asarray(blocks, np.intp)] > 1))

    def num_cached_last(self, blocks: Sequence[BlockId]) -> int:
        """How many of the last of these are CACHED, without a gap."""
        others = np.flatnonzero(self._states[np.asarray(blocks, np.intp)] != _CACHED)
        return len(blocks) - 1 - int(others[-1]) if len(others) else len(blocks)

    def cached_and_held(self, blocks: Sequence[BlockId]) -> tuple[Sequence[BlockId], Sequence[BlockId]]:
        """Returns the blocks that nobody holds, and the others; each part in the given order."""
        indices = np.asarray(blocks, np.int32)
        are_cached = self._states[indices] == _CACHED
        parts = (array("i", indices[are_cached].tobytes()), array("i", indices[~are_cached].tobytes()))
        return cast("tuple[Sequence[BlockId], Sequence[BlockId]]", parts)

    def is_shared(self, block: BlockId) -> bool:
        """Whether a holder must copy the block before writing into it: others hold it, or count on its content."""
        return self._ref_count[block] > 1 or bool(self._known[block])

    def allocate(self, num_blocks: int, state: BlockState = BlockState.LIVE) -> tuple[BlockId, ...]:
        """Takes blocks from the free list, each with one holder: the caller, who releases them.

        `state` is LIVE (computed here) or RESERVED (to be received). Raises PoolExhausted.
        """
        code = _STATES.index(state)
        if num_blocks < 0 or not _ALLOWED[_FREE][code]:
            raise InternalError(f"allocate {num_blocks} blocks as {state}")
        if num_blocks > len(self._free):
            raise PoolExhausted(f"{num_blocks} KV blocks wanted, {len(self._free)} free of {self.num_blocks}")
        keep = len(self._free) - num_blocks
        blocks = tuple(reversed(self._free[keep:]))
        del self._free[keep:]
        if num_blocks > _FEW:
            indices = np.array(blocks, np.intp)
            self._generations[indices] += 1
            self._ref_counts[indices] = 1
            self._states[indices] = code
        else:
            for block in blocks:
                self._generation[block] += 1
                self._ref_count[block] = 1
                self._state[block] = code
        self._count_move(num_blocks, _FREE, code)
        return blocks

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """Adds a holder to each of these LIVE or CACHED blocks; paired with one more `release`."""
        indices = self._require(blocks, (_LIVE, _CACHED), "retain")
        self._ref_counts[indices] += 1
        if len(cached := indices[self._states[indices] == _CACHED]):
            self._states[cached] = _LIVE
            self._count_move(len(cached), _CACHED, _LIVE)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Takes one holder away from each block; with the last one it is free, cached or quarantined."""
        indices = self._require(blocks, (_LIVE, _RESERVED, _RECEIVING), "release")
        self._ref_counts[indices] -= 1
        let_go = indices[self._ref_counts[indices] == 0]
        is_known = self._knowns[let_go] == 1
        cached = let_go[is_known]
        self._states[cached] = _CACHED
        self._count_move(len(cached), _LIVE, _CACHED)
        if len(forgotten := let_go[~is_known]):
            may_be_written = (self._states[forgotten] == _RECEIVING) & (self._writers_gone[forgotten] == 0)
            self._move_all(forgotten[may_be_written], _QUARANTINED)
            self._free_blocks(forgotten[~may_be_written])

    def keep(self, blocks: Sequence[BlockId]) -> None:
        """The content of these LIVE blocks is known: without a holder they are cached, not free. Idempotent."""
        self._knowns[self._require(blocks, (_LIVE,), "keep")] = 1

    def forget(self, blocks: Sequence[BlockId]) -> None:
        """Undoes `keep`: these LIVE blocks will be free without a holder. Idempotent."""
        self._knowns[self._require(blocks, (_LIVE,), "forget")] = 0

    def evict(self, blocks: Sequence[BlockId]) -> None:
        """Frees these CACHED blocks."""
        self._free_blocks(self._require(blocks, (_CACHED,), "evict"))

    def start_receiving(self, blocks: Sequence[BlockId]) -> None:
        """A writer has shown its ticket for these RESERVED blocks; bytes may follow."""
        self._move_all(self._require(blocks, (_RESERVED,), "start_receiving"), _RECEIVING)

    def seal(self, blocks: Sequence[BlockId]) -> None:
        """Moves verified blocks, whose writer has stopped: RECEIVING → LIVE."""
        indices = self._require(blocks, (_RECEIVING,), "seal")
        if self._writers_gone[indices].any():
            raise InternalError("seal of blocks whose writer stopped before they were verified")
        self._move_all(indices, _LIVE)

    def writer_stopped(self, blocks: Sequence[BlockId]) -> None:
        """Ends the time in which a writer could reach these blocks, which were never verified. QUARANTINED blocks
        become free. RECEIVING blocks become free when their holder releases them. RESERVED blocks never had a
        writer: nothing to do.
        """
        indices = self._require(blocks, (_QUARANTINED, _RECEIVING, _RESERVED), "writer_stopped")
        states = self._states[indices]
        self._writers_gone[indices[states == _RECEIVING]] = 1
        self._free_blocks(indices[states == _QUARANTINED])

    def shared(self, blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Returns `is_shared` of each."""
        shared: npt.NDArray[np.bool_] = (self._ref_counts[blocks] > 1) | (self._knowns[blocks] != 0)
        return shared

    def counts(self, unused_slots: int = 0) -> PoolCounts:
        """Returns the blocks by state. `unused_slots`: token slots of LIVE blocks without a token, as holders know."""
        free, reserved, receiving, live, cached, quarantined = self._num_in_state
        return PoolCounts(
            total=self.num_blocks,
            free=free,
            reserved=reserved,
            receiving=receiving,
            live=live,
            quarantined=quarantined,
            cached=cached,
            block_size=self.block_size,
            unused_slots=unused_slots,
        )

    def check_invariants(self) -> None:
        """Recounts everything, O(N). Raises InternalError naming what is broken."""
        states, holders = self._state, self._ref_count
        is_held = [state in (_RESERVED, _RECEIVING, _LIVE) for state in states]
        has_content = [state in (_LIVE, _CACHED) for state in states]
        laws = {
            "state counts": all(states.count(code) == num for code, num in enumerate(self._num_in_state)),
            "free list is unique": len(set(self._free)) == len(self._free),
            "free list = FREE blocks": all(states[block] == _FREE for block in self._free),
            "free list is complete": len(self._free) == self._num_in_state[_FREE],
            "held <=> ref_count": is_held == [num > 0 for num in holders],
            "only LIVE is shared": all(num <= 1 or states[block] == _LIVE for block, num in enumerate(holders)),
            "only LIVE or CACHED is known": all(
                has for has, known in zip(has_content, self._known, strict=True) if known
            ),
            "CACHED is known": all(self._known[block] or state != _CACHED for block, state in enumerate(states)),
            "writer gone only in RECEIVING": all(
                not gone or states[block] == _RECEIVING for block, gone in enumerate(self._writer_gone)
            ),
        }
        broken = [name for name, holds in laws.items() if not holds]
        if broken:
            raise InternalError(f"block pool: {'; '.join(broken)}; {self.counts()}")

    def assert_idle(self) -> None:
        """Raises InternalError unless every block is free or cached."""
        self.check_invariants()
        if len(self._free) + self.num_cached != self.num_blocks:
            raise InternalError(f"block pool is not idle: {self.counts()}")

    def _require(self, blocks: Sequence[BlockId], states: tuple[int, ...], verb: str) -> npt.NDArray[np.intp]:
        """The blocks as indices; raises InternalError if one is named twice or in another state."""
        indices = np.asarray(blocks, np.int32).astype(np.intp)
        if len(indices) > _FEW and self._are_distinct(indices):
            found = self._states[indices]
            if sum(np.count_nonzero(found == state) for state in states) == len(indices):
                return indices
        if len(set(blocks)) != len(blocks):
            raise InternalError(f"{verb} names a block twice")
        for block in blocks:
            if not 0 <= block < self.num_blocks or self._state[block] not in states:
                where = self.state(block) if 0 <= block < self.num_blocks else "nowhere"
                raise InternalError(f"{verb} of block {block}, which is {where}")
        return indices

    def _are_distinct(self, indices: npt.NDArray[np.intp]) -> bool:
        """Whether these are blocks of the pool, none of them twice."""
        if len(indices) > self.num_blocks or indices.view(np.uintp).max() >= self.num_blocks:  # < 0 is large
            return False
        numbers = self._numbers[: len(indices)]
        self._order[indices] = numbers
        return bool((self._order[indices] == numbers).all())

    def _free_blocks(self, indices: npt.NDArray[np.intp]) -> None:
        self._move_all(indices, _FREE)
        self._writers_gone[indices] = self._knowns[indices] = 0
        self._free.extend(indices[::-1].tolist())  # so that the next allocation gives them in the same order

    def _move_all(self, indices: npt.NDArray[np.intp], to: int) -> None:
        for state, count in enumerate(np.bincount(self._states[indices], minlength=len(_STATES)).tolist()):
            if count and not _ALLOWED[state][to]:
                advance(BLOCK_MOVES, _STATES[state], _STATES[to])  # raises with both names
            if count:
                self._count_move(count, state, to)
        self._states[indices] = to

    def _count_move(self, num_blocks: int, state: int, to: int) -> None:
        self._num_in_state[state] -= num_blocks
        self._num_in_state[to] += num_blocks
