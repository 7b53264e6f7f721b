"""A KV pool as a bar of characters, one kind for each state of blocks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.types import PoolCounts


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters that a terminal can show."""

    live: str
    receiving: str
    reserved: str
    quarantined: str
    free: str
    ellipsis: str

    def legend(self) -> str:
        """What the characters of a bar mean."""
        return (
            f"{self.live} live  {self.receiving} receiving  {self.reserved} reserved  "
            f"{self.quarantined} quarantined  {self.free} free"
        )


UNICODE = Glyphs("█", "▓", "▒", "×", "·", "…")
ASCII = Glyphs("#", "+", "-", "x", ".", "~")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Those that an output of this encoding can carry."""
    try:
        "".join((UNICODE.live, UNICODE.receiving, UNICODE.reserved, UNICODE.ellipsis)).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def pool_bar(pool: PoolCounts, width: int, glyphs: Glyphs) -> str:
    """`width` characters, shared among the states as blocks are; a state that has any gets at least one."""
    parts = (
        (pool.live, glyphs.live),
        (pool.receiving, glyphs.receiving),
        (pool.reserved, glyphs.reserved),
        (pool.quarantined, glyphs.quarantined),
    )
    bar = ""
    for count, glyph in parts:
        cells = max(1, round(width * count / pool.total)) if count else 0
        bar += glyph * cells
    return bar[:width].ljust(width, glyphs.free)
