"""The mask that a model of transformers makes for a layer, asked for the window that it stands for.

What a layer tells attention of its window is not enough: some models have it in their mask alone, and the mask is what
transformers computes by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

ASKED = "tandem-asked"
"""The implementation of attention for which models make such masks."""
_FAR = (1 << 20) - 1
"""A position beyond every window."""

Sees = Callable[..., torch.Tensor]
"""Mask function of transformers: from batch, head, positions of queries and of keys to whether the query sees the key.
"""


class UnsupportedModel(Exception):
    """The model computes in a way that our parts do not; says in which."""


class Mask:
    """What queries of a layer see, at any position."""

    def __init__(self, sees: Sees) -> None:
        self._sees = sees

    def window(self, asked: int | None) -> int | None:
        """Keys that a query sees, itself included; None sees all before it. `asked`: what the layer tells attention.

        Raises UnsupportedModel if the mask is neither causal nor a causal window, or `asked` is another window.
        """
        if asked is not None and asked != self._window:
            has = "none" if self._window is None else f"one of {self._window}"
            raise UnsupportedModel(f"attention with a window of {asked} where its mask has {has}")
        return self._window

    @cached_property
    def _window(self) -> int | None:
        num_seen = int(self._seen_from(_FAR).sum())
        window = None if num_seen == _FAR + 1 else num_seen
        edges = (_FAR,) if window is None else (window - 1, window, 2 * window, _FAR)
        for query in (0, 1, *edges):
            keys = torch.arange(query + 2)
            expected = (keys <= query) & (keys > query - num_seen)
            if not torch.equal(self._seen_from(query), expected):
                raise UnsupportedModel("attention that is neither causal nor a window")
        return window

    def _seen_from(self, query: int) -> torch.Tensor:
        """Whether the query at that position sees each key `[query + 2]` up to one after it."""
        keys, zero = torch.arange(query + 2), torch.tensor(0)
        return self._sees(zero, zero, torch.tensor(query), keys).expand_as(keys)


def _make_mask(*, mask_function: Sees, **_: object) -> Mask:
    return Mask(mask_function)


ALL_MASK_ATTENTION_FUNCTIONS.register(ASKED, _make_mask)
