"""Sets of workers as the bits of an int: bit n is worker number n.

With a thousand workers such a set is 16 words long: to intersect two takes less time than to look at one worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TypeAlias

WorkerSet: TypeAlias = int


def members(workers: WorkerSet) -> Iterator[int]:
    """Their numbers, in order."""
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest


def draw(workers: WorkerSet, at_most: int, rng: Random) -> list[int]:
    """Draws some workers, each with equal chance."""
    size = workers.bit_count()
    return [_nth(workers, each) for each in rng.sample(range(size), min(at_most, size))]


def _nth(workers: WorkerSet, index: int) -> int:
    """Returns the number of the member that `index` others precede, found by halving."""
    number, width = 0, workers.bit_length()
    while width > 1:
        half = width // 2
        lower = workers & ((1 << half) - 1)
        num_lower = lower.bit_count()
        if index < num_lower:
            workers, width = lower, half
        else:
            workers, width = workers >> half, width - half
            number, index = number + half, index - num_lower
    return number
