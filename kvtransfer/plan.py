"""Which bytes of each block go from which part of a sender's pool to which part of a receiver's. Pure.

Ranks of a tensor-parallel worker divide the heads of every block: heads lie one behind the other, so rank r holds one
interval of a block, and ranks that outnumber the heads hold the same one. A block is cut into *grains*, the largest
equal intervals that no part of either side divides:

    block         0 · · · 1 · · · 2 · · · 3 · · ·     grains
    2 ranks       [ rank 0      ) [ rank 1      )
    4 ranks       [ 0   ) [ 1   ) [ 2   ) [ 3   )
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from tandem.kv_layout import KvLayout


class Span(NamedTuple):
    """The grains of a block that lie in one part, in the part's order."""

    rank: int
    grains: range


class Place(NamedTuple):
    """Where a block's grain lies."""

    rank: int
    grain: int


WHOLE = (Place(0, 0),)
"""The places of a block that no side divides."""


class Move(NamedTuple):
    """A grain's way: its place in the source's part and in the target's, counted in grains."""

    source: int
    source_place: int
    target: int
    target_place: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How blocks of a sender's pool lie in a receiver's."""

    num_grains: int
    """Grains of a block."""
    source: tuple[Span, ...]
    """The parts that are read, in the block's order: each grain lies in one of them."""
    target: tuple[Span, ...]
    """Parts of the receiver, by rank: each part is written whole."""

    @classmethod
    def between(cls, layout: KvLayout, num_sources: int, num_targets: int) -> Plan:
        """Raises ConfigError if the layout's heads cannot be divided so."""
        sizes = [layout.part(num_ranks).num_kv_heads for num_ranks in (num_sources, num_targets)]
        num_grains = layout.num_kv_heads // gcd(*sizes)
        source, target = (_spans(num_grains, num_ranks) for num_ranks in (num_sources, num_targets))
        return cls(num_grains, distinct(source), target)

    @property
    def is_whole(self) -> bool:
        """Returns whether whole blocks go from a single part to a single part."""
        return len(self.source) == len(self.target) == 1

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """Ranks of the target that hold what an earlier rank holds."""
        first = {span.grains: span.rank for span in distinct(self.target)}
        pairs = ((first[span.grains], span.rank) for span in self.target)
        return tuple((source, to) for source, to in pairs if source != to)

    def moves(self) -> Iterator[Move]:
        """Yields what fills every part of the target, part by part."""
        origin = [(span.rank, place) for span in self.source for place in range(len(span.grains))]
        for span in self.target:
            for place, grain in enumerate(span.grains):
                yield Move(*origin[grain], span.rank, place)


def places(spans: tuple[Span, ...]) -> tuple[Place, ...]:
    """Returns every place of these parts, part by part."""
    return tuple(Place(span.rank, grain) for span in spans for grain in span.grains)


def distinct(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Returns the first part of those that hold the same grains, in the block's order."""
    return tuple({span.grains: span for span in reversed(spans)}.values())[::-1]


def _spans(num_grains: int, num_ranks: int) -> tuple[Span, ...]:
    """The parts by rank. Grains of a part, and ranks of a part, are whole numbers: see `KvLayout.part`."""
    size = max(1, num_grains // num_ranks)
    sharing = num_ranks * size // num_grains
    return tuple(Span(rank, range(rank // sharing * size, (rank // sharing + 1) * size)) for rank in range(num_ranks))
