"""What penalties must know of one choice's tokens: which ids, and how often the completion has each.

Kept as tokens come, so that a step asks for what is new instead of counting everything again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tandem.types import TokenId

Ints = npt.NDArray[np.int64]


def distinct(token_ids: Sequence[TokenId]) -> Ints:
    """Each id once, ascending; they are small, so counting is faster than sorting."""
    return np.flatnonzero(np.bincount(np.asarray(token_ids, dtype=np.int64)))


class TokenHistory:
    """Prompt and completion of one choice. What it returns stays as it is while tokens are added."""

    __slots__ = ("_counts", "_ids", "_places", "prompt_ids")

    def __init__(self, prompt_ids: Ints, output_token_ids: Iterable[TokenId] = ()) -> None:
        """`prompt_ids`: the prompt's `distinct` ids, shared with other choices; none if no penalty looks at them."""
        self.prompt_ids = prompt_ids
        self._places: dict[TokenId, int] = {}
        """Where an id stands in the two arrays."""
        self._ids = array("q")
        self._counts = array("q")
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: TokenId) -> None:
        """Appends a token of the completion."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(1)
        else:
            self._counts[place] += 1

    @property
    def output_ids(self) -> Ints:
        """`[n]`: the completion's ids, each once, in the order of their first tokens; a copy."""
        return np.array(self._ids, dtype=np.int64)

    @property
    def output_counts(self) -> Ints:
        """`[n]`: how often the completion has each of `output_ids`; a copy."""
        return np.array(self._counts, dtype=np.int64)
