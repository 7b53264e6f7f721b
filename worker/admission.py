"""Who gets blocks next on a worker: lines of requests, one rule of ageing, one forecast. Pure: no clock, no I/O.

    line ──first in order that fits──▶ holds blocks ──▶ ended, preempted, handed over

Ageing: whoever gets room before a request that came earlier overtakes that request. A request that was overtaken
`MAX_OVERTAKES` times is overdue: it goes before all that are not, and they wait until it fits. So nobody starves. The
rule holds in each line: prompts for others (`prefill_worker.prompt_line`), reservations (`decode_worker.reservations`),
and requests that wait for a seat or for their blocks again (`decode_worker.scheduler`).

Forecast: a newcomer fits if its tokens and its expected growth find room beside the most that all others are expected
to hold at any time. Lengths are learned from the last completions that ended here: a sequence is expected to become as
long as three of four of those that became longer than it is now; one that has outlived them all, twice as long as it
is; none longer than its own max_tokens. Running sequences grow by a token each step, and a group that ends gives back
what it holds, so they hold most just before one of them ends. A request that does not run yet begins at an unknown
time: it counts with all its growth, and gives nothing back. The method is the Past-Future scheduler's (Gong et al.,
ASPLOS 2025), with a quantile in place of random draws: equal events lead to equal decisions.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any, TypeAlias

from engine.block_pool import BlockPool
from engine.group import Group
from engine.sequence import Sequence
from worker.request import Request
from worker.tuning import FIRST_GUESS_TOKENS, MAX_OVERTAKES, REMEMBERED, TURN_TOKENS

Turn: TypeAlias = tuple[int, int, int]
"""Smaller goes first; no two requests have the same."""


def turn_of(request: Request, num_left: int) -> Turn:
    """Returns a prompt's turn to be computed: higher priority first, then the shortest, within a bound on age.

    Time is counted in prompt tokens that the worker has computed. Once `TURN_TOKENS * n` were computed since a prompt
    of n tokens came, every newcomer's turn is behind: long prompts wait in proportion to their own length.
    """
    negative_priority, number = request.rank
    return negative_priority, request.came_after_tokens + TURN_TOKENS * num_left, number


def is_overdue(request: Request) -> bool:
    """Returns whether a request was overtaken so often that it goes before all others."""
    return request.num_overtaken >= MAX_OVERTAKES


def note_overtaken(waiting: Iterable[Request], admitted: Iterable[Request]) -> None:
    """Ages each request that waits by the admitted ones that came after it."""
    numbers = sorted(request.rank[1] for request in admitted)
    for request in waiting if numbers else ():
        request.num_overtaken += len(numbers) - bisect.bisect(numbers, request.rank[1])


class Line:
    """Requests that hold no blocks yet: overdue ones by their arrival, then all others in order."""

    def __init__(self, order: Callable[[Request], Any]) -> None:
        """`order` returns the same for a request as long as it is in line; smaller goes first."""
        self._order = order
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        yield from sorted(filter(is_overdue, self._requests), key=lambda each: each.rank[1])
        yield from (each for each in self._requests if not is_overdue(each))

    def add(self, request: Request) -> None:
        """Puts a request in line."""
        bisect.insort(self._requests, request, key=self._order)

    def remove(self, request: Request) -> None:
        """Takes a request out of the line. A no-op if it is not there."""
        if request in self._requests:
            self._requests.remove(request)


class Forecast:
    """How far the sequences of one worker are expected to grow. Reads groups and the pool, changes neither."""

    def __init__(self, pool: BlockPool, first_guess_tokens: int = FIRST_GUESS_TOKENS) -> None:
        self._pool = pool
        self._lengths = deque([first_guess_tokens], REMEMBERED)
        self._sorted = [first_guess_tokens]

    def completed(self, num_tokens: int) -> None:
        """Learns from an ended completion of `num_tokens`, at least 1."""
        if len(self._lengths) == REMEMBERED:
            del self._sorted[bisect.bisect_left(self._sorted, self._lengths[0])]
        self._lengths.append(num_tokens)
        bisect.insort(self._sorted, num_tokens)

    def tokens_left(self, seq: Sequence) -> int:
        """Returns the tokens, at least one, that an unfinished sequence is expected to draw."""
        num_tokens = seq.num_output_tokens
        at = bisect.bisect_right(self._sorted, num_tokens)
        num_longer = len(self._sorted) - at
        expected = self._sorted[at + (3 * num_longer - 1) // 4] if num_longer else 2 * num_tokens
        return min(expected, seq.params.max_tokens) - num_tokens

    def all_blocks(self, group: Group) -> int:
        """Returns the blocks that a group lacks for the tokens it has and for all its growth."""
        return group.num_missing_blocks(self._pool) + sum(map(self._num_blocks, self._lefts(group)))

    def most_blocks(
        self, running: Iterable[Request], waiting: Iterable[Request], within_steps: int | None = None
    ) -> int:
        """Returns the most blocks, beyond those held now, that requests are expected to hold at any time.

        `waiting`: those that do not run yet, with or without blocks. `within_steps`: as far as to look; None = to the
        end. A choice that ends before its group counts as if it had given its growth back.
        """
        taken = sum(self.all_blocks(request.group) for request in waiting)
        ends: list[tuple[int, int]] = []  # after how many steps, and what is held until then without growth
        for request in running:
            group = request.group
            taken -= group.num_returned_blocks
            held_blocks = group.num_returned_blocks + group.num_missing_blocks(self._pool)
            ends += zip(self._lefts(group), chain([held_blocks], repeat(0)), strict=False)
        most = taken
        for num_growing, (left, num_blocks) in enumerate(sorted(ends, reverse=True), 1):
            taken += num_blocks
            steps = left if within_steps is None else min(left, within_steps)
            most = max(most, taken + num_growing * self._num_blocks(steps))
        return most

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _lefts(self, group: Group) -> list[int]:
        """Returns what is left of each choice, or of each beam that there can be, longest first."""
        if len(group.sequences) == 1:
            return [self.tokens_left(group.sequences[0])] * group.num_seats
        return sorted([self.tokens_left(seq) for seq in group.sequences if not seq.is_finished], reverse=True)
