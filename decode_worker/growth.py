"""How far sequences are expected to grow, and how many blocks that takes by when. Counts in steps, knows no clock.

Lengths are learned from the last completions that ended here: a sequence is expected to become as long as three of
four of those that became longer than it is now; one that has outlived them all, twice as long as it is; none longer
than its own max_tokens.

Running sequences grow by a token each step, and one that ends gives back what it holds. So they hold most just before
one of them ends: in t steps, those that end later hold what they hold now and t more tokens each. One in hand-off is
expected to hold its blocks for the hand-off and then for its steps. One that waits for a seat or for blocks begins at
an unknown time: it counts with all its growth, and as never giving anything back.

The method is the Past-Future scheduler's (Gong et al., ASPLOS 2025), with a quantile in place of random draws: equal
events lead to equal decisions.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from engine.block_pool import BlockPool
from engine.group import Group
from engine.sequence import Sequence
from worker.request import Request

WINDOW = 128
"""Completions that are remembered."""
FIRST_GUESS_TOKENS = 256
"""The one length that is remembered before any completion has ended."""


class Forecast:
    """Blocks that are expected to be taken beyond those held now, at each of the coming steps."""

    def __init__(self, block_size: int, taken: int, ends: Iterable[tuple[int, int, int]]) -> None:
        """`taken`: at last. `ends`: until which step, so many more blocks, and so many sequences that grow."""
        self._block_size = block_size
        self._last = taken
        spans: list[tuple[int, int, int]] = []
        num_growing = 0
        for step, blocks, num_seqs in sorted(ends, reverse=True):
            taken += blocks
            num_growing += num_seqs
            spans.append((step, taken, num_growing))
        self._spans = spans[::-1]
        """Ascending: until which step so many blocks are taken, and by how many tokens per step they grow."""
        self._most = [*accumulate((self._at(*span) for span in self._spans), max)]
        """Of each span and those before it."""

    def most_blocks(self, num_steps: int) -> int:
        """Most blocks that are taken at any time within the next `num_steps`."""
        at = bisect.bisect_left(self._spans, (num_steps,))
        most = self._most[at - 1] if at else 0
        if at == len(self._spans):
            return max(most, self._last)
        _, taken, num_growing = self._spans[at]
        return max(most, self._at(num_steps, taken, num_growing))

    def _at(self, step: int, taken: int, num_growing: int) -> int:
        return taken + num_growing * -(-step // self._block_size)


class Growth:
    """What is known of completions on one worker. Reads groups and the pool, changes neither."""

    def __init__(self, pool: BlockPool, first_guess_tokens: int = FIRST_GUESS_TOKENS) -> None:
        self._pool = pool
        self._lengths = deque([first_guess_tokens], WINDOW)
        self._sorted = [first_guess_tokens]

    def completed(self, num_tokens: int) -> None:
        """A completion of so many tokens, at least one, has ended."""
        if len(self._lengths) == WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._lengths[0])]
        self._lengths.append(num_tokens)
        bisect.insort(self._sorted, num_tokens)

    def tokens_left(self, seq: Sequence) -> int:
        """How many more tokens it is expected to draw, at least one; it has not finished."""
        num_tokens = seq.num_output_tokens
        at = bisect.bisect_right(self._sorted, num_tokens)
        num_longer = len(self._sorted) - at
        expected = self._sorted[at + (3 * num_longer - 1) // 4] if num_longer else 2 * num_tokens
        return min(expected, seq.params.max_tokens) - num_tokens

    def forecast(
        self,
        seated: Iterable[Request],
        waiting: Iterable[Request],
        incoming: Iterable[Request] = (),
        handoff_steps: int = 0,
    ) -> Forecast:
        """Of requests that run, that wait with or without blocks, and whose blocks are reserved or being received."""
        size = self._pool.block_size
        taken = sum(self._most_blocks(request.group) for request in waiting)
        ends: list[tuple[int, int, int]] = []
        for request in seated:
            taken -= request.group.num_returned_blocks
            self._add_ends(ends, request.group, 0)
        for request in incoming:
            taken -= -(-request.group.prefix.num_tokens // size) - request.group.num_borrowed_blocks
            self._add_ends(ends, request.group, handoff_steps)
        return Forecast(size, taken, ends)

    def blocks_wanted(self, group: Group, forecast: Forecast, delay_steps: int) -> int:
        """Blocks that must be available for a group, now without any, begun in `delay_steps`, to end beside others."""
        num_steps = delay_steps + max(self._lefts(group))
        return self._most_blocks(group) + forecast.most_blocks(num_steps)

    def _most_blocks(self, group: Group) -> int:
        """Blocks that it lacks for the tokens it has, and for all its growth."""
        size = self._pool.block_size
        return group.num_missing_blocks(self._pool) + sum(-(-left // size) for left in self._lefts(group))

    def _lefts(self, group: Group) -> list[int]:
        """What is left of each choice, or of each beam that there can be, longest first."""
        if len(group.sequences) == 1:
            return [self.tokens_left(group.sequences[0])] * group.num_seats
        return sorted([self.tokens_left(seq) for seq in group.sequences if not seq.is_finished], reverse=True)

    def _add_ends(self, ends: list[tuple[int, int, int]], group: Group, delay_steps: int) -> None:
        """The last of a group's choices gives back its blocks; what another one may give back earlier is left out."""
        num_blocks = group.num_returned_blocks + group.num_missing_blocks(self._pool)
        for left in self._lefts(group):
            growth = -(-left // self._pool.block_size)
            ends.append((left + delay_steps, num_blocks + growth, 0))
            ends.append((left, -growth, 1))
            num_blocks = 0
