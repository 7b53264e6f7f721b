"""The door of what the ranks of one model exchange: sums, gathered columns, and what rank 0 says to all.

Every rank calls the same operations in the same order with tensors of the same shapes. One implementation per kind of
device (`shared_group`: processes on CPUs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class GroupBroken(Exception):
    """A rank has died, hangs, or gave up. The other ranks of its model cannot go on either."""


class Group(Protocol):
    """The ranks `[0, size)` of one model; `size` is a power of two. All operations may raise GroupBroken."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the x of all ranks, of one shape, as `tree_sum` adds; the same to the bit on every rank."""

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """X `[T, widths[rank]]` → the columns of all ranks, in their order: `[T, sum(widths)]`."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the x of rank 0; the x of the others gives shape and dtype."""


@dataclass(frozen=True, slots=True)
class SoloGroup:
    """The only rank of a model: implements `Group` without an exchange."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group`."""
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """See `Group`."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group`."""
        return x


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adds a power of two of parts in pairs, the sums in pairs again: `((0 + 1) + (2 + 3)) + …`.

    So the sum of the sums of 2, 4 or 8 neighbours each is the sum of all, to the bit.
    """
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
