"""A long run of tokens, four bytes each: as a tuple, a prompt of a million would take a tenth of a second to make."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from typing import cast, overload

from tandem.types import TokenId

_PIECE = 1 << 15
"""Tokens that are read at a time: about a millisecond."""


class TokenIds(Sequence[TokenId]):
    """Never changed once made. Equal to a tuple of the same tokens; a slice of it is a tuple."""

    __slots__ = ("as_array", "highest")

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        """Each from 0 to 2**32 - 1. Raises OverflowError."""
        self.as_array = array("I", token_ids)
        """Not to be changed."""
        self.highest = max(token_ids, default=-1)
        """-1 where there are none."""

    @classmethod
    async def read(cls, token_ids: Sequence[int]) -> TokenIds:
        """The same, in pieces, between which others on the loop get their turn."""
        made = cls(token_ids[:_PIECE])
        for start in range(_PIECE, len(token_ids), _PIECE):
            await asyncio.sleep(0)
            piece = token_ids[start : start + _PIECE]
            made.as_array.extend(piece)
            made.highest = max((made.highest, *piece))
        return made

    def __len__(self) -> int:
        return len(self.as_array)

    @overload
    def __getitem__(self, at: int) -> TokenId: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[TokenId, ...]: ...

    def __getitem__(self, at: int | slice) -> TokenId | tuple[TokenId, ...]:
        if isinstance(at, slice):
            return tuple(cast("Sequence[TokenId]", self.as_array[at]))
        return TokenId(self.as_array[at])

    def __iter__(self) -> Iterator[TokenId]:
        return cast("Iterator[TokenId]", iter(self.as_array))

    def __add__(self, others: tuple[TokenId, ...]) -> TokenIds:
        both = TokenIds()
        both.as_array = self.as_array + array("I", others)
        both.highest = max((self.highest, *others))
        return both

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.as_array == other.as_array
        return isinstance(other, tuple) and tuple(self.as_array) == other

    def __hash__(self) -> int:
        return hash(tuple(self.as_array))

    def __repr__(self) -> str:
        return f"TokenIds of {len(self)} tokens"
