"""Which set of equal workers serves new requests.

Workers with equal model and layout fingerprints form a set. Any worker of a set can continue an answer of another one;
across sets nothing is continued, handed over or found in a cache. New requests go to one set, the others are set apart:

    leader   the set with the most ready seats; of equally many, the one with the larger fingerprints
    serves   the first leader; then the set that serves until another one has led for `TAKE_OVER_S`

The order has no memory and the clock starts with what workers report, so routers that hear the same decide alike. A
router that has just started follows the leader at once, as long as its workers still register. Pure: time is given.
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
        self.current: SetId | None = SetId(pinned, "") if pinned else None
        """The set that serves, whether or not it is ready; None = no set was ready yet."""
        self.apart: frozenset[SetId] = frozenset()
        """The other sets that have workers."""
        self._pinned = pinned
        self._began_s: float | None = None
        """When the first set began to serve."""
        self._behind_s: float | None = None
        """Since when the current set is not the leader; None = it leads."""

    def choose(self, seats: Mapping[SetId, int], now_s: float) -> bool:
        """Takes the ready seats of each set that has workers. Returns whether another set serves from now on."""
        has_changed = self._follow(seats, now_s)
        is_alone = self.current is None and len(seats) == 1
        self.apart = frozenset() if is_alone else frozenset(seats) - {self.current}
        return has_changed

    def why_apart(self, set_id: SetId) -> str:
        """Returns why a set gets no new requests, for people; empty = it does."""
        if set_id not in self.apart:
            return ""
        return "no set of equal workers can serve" if self.current is None else set_id.difference(self.current)

    def _follow(self, seats: Mapping[SetId, int], now_s: float) -> bool:
        ready = [each for each in seats if seats[each] and each.model_fingerprint.startswith(self._pinned)]
        leader = max(ready, key=lambda each: (seats[each], each), default=None)
        if leader is not None and leader == self.current:
            self._behind_s = None
            return False
        if self._behind_s is None:
            self._behind_s = now_s
        if leader is None or now_s < self._earliest_s:
            return False
        if self._began_s is None:
            self._began_s = now_s
        self.current, self._behind_s = leader, None
        return True

    @property
    def _earliest_s(self) -> float:
        """When another set may take over."""
        assert self._behind_s is not None
        is_young = self._began_s is None or self._behind_s < self._began_s + TAKE_OVER_S
        return self._behind_s if is_young else self._behind_s + TAKE_OVER_S
