"""Which set of equal workers serves new requests.

Workers with equal model and layout fingerprints form a set. Any worker of a set can continue an answer of another one;
across sets nothing is continued, handed over or found in a cache. New requests go to one set, the others are set apart:

    ahead    has more ready seats than the set that serves, or as many and larger fingerprints
    serves   the first set with ready seats; then the one with the most of those that have been ahead for `TAKE_OVER_S`

A set that was not there had no seats: where nobody had any, each that comes was ahead. The order has no memory, so
routers that hear the same come to decide alike. A router that has just started waits for nothing: its workers still
register. Pure: time is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tandem.types import WorkerInfo

TAKE_OVER_S = 5.0
"""As long as a worker's lease: a set whose workers are only late keeps serving."""

_REMEDIES = {
    "model_fingerprint": "give all the same --model, --dtype, --quantize and --model-impl",
    "layout_fingerprint": "give all the same --block-size and --kv-dtype",
}


class SetId(NamedTuple):
    """What the workers of a set have in common."""

    model_fingerprint: str
    layout_fingerprint: str

    @classmethod
    def of(cls, info: WorkerInfo) -> SetId:
        """Returns the set that a worker belongs to."""
        return cls(info.model_fingerprint, info.layout_fingerprint)

    def difference(self, other: SetId) -> str:
        """Returns the first field in which two sets differ, with both values and the remedy; empty = none."""
        for name, ours, theirs in zip(self._fields, self, other, strict=True):
            if ours != theirs:
                return f"{name} differs, {ours} and {theirs}: {_REMEDIES[name]}"
        return ""


class ServingSet:
    """Call `choose` after each change, and every fraction of a second."""

    def __init__(self, pinned: str = "") -> None:
        """`pinned`: how the model fingerprint of a set that may serve begins; empty = any may."""
        self.current: SetId | None = None
        """The set that serves, whether or not it is ready; None = no set was ready yet."""
        self.apart: frozenset[SetId] = frozenset()
        """The other sets that have workers."""
        self._pinned = pinned
        self._first_s: float | None = None
        """When `choose` was called first with a set."""
        self._empty_s: float | None = None
        """Since when the current set has no ready seat; None = it has some."""
        self._ahead_s: dict[SetId, float] = {}
        """Sets ahead of the current set, with the time since when."""

    @property
    def wanted(self) -> SetId | None:
        """The set for new requests; None = any, for none was ready yet. Of a pinned model, one that nobody is in."""
        return SetId(self._pinned, "") if self.current is None and self._pinned else self.current

    @property
    def is_overtaken(self) -> bool:
        """Whether another set is ready, and takes over in `TAKE_OVER_S` if nothing changes."""
        return bool(self._ahead_s)

    def choose(self, seats: Mapping[SetId, int], now_s: float) -> bool:
        """Takes the ready seats of each set that has workers. Returns whether another set serves from now on."""
        if self._first_s is None and seats:
            self._first_s = now_s
        is_young = self._first_s is None or now_s < self._first_s + TAKE_OVER_S
        own = 0 if self.current is None else seats.get(self.current, 0)
        self._empty_s = None if own else now_s if self._empty_s is None else self._empty_s
        since_s = now_s if self._empty_s is None else self._empty_s
        ahead = [each for each in seats if self._is_ahead(each, seats[each], own)]
        self._ahead_s = {each: self._ahead_s.get(each, since_s) for each in ahead}
        ripe = [each for each in ahead if is_young or now_s - self._ahead_s[each] >= TAKE_OVER_S]
        if ripe:
            self.current = max(ripe, key=lambda each: (seats[each], each))
            self._ahead_s, self._empty_s = {}, None
        is_settled = self.current is not None or not is_young
        self.apart = frozenset(seats) - {self.current} if is_settled else frozenset()
        return bool(ripe)

    def why_apart(self, set_id: SetId) -> str:
        """Returns why a set gets no new requests, for people; empty = it does."""
        if set_id not in self.apart:
            return ""
        if not set_id.model_fingerprint.startswith(self._pinned):
            return f"model_fingerprint {set_id.model_fingerprint} is not the one of --model-fingerprint {self._pinned}"
        return "no set of equal workers can serve" if self.current is None else set_id.difference(self.current)

    def _is_ahead(self, other: SetId, seats: int, own: int) -> bool:
        if not seats or other == self.current or not other.model_fingerprint.startswith(self._pinned):
            return False
        return self.current is None or (seats, other) > (own, self.current)
