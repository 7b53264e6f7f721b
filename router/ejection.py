"""Which workers, and which pairs of them, failed lately and are set aside. Pure: time is given, nothing is sent.

    healthy ──3 failures in a row, or 8 of the last 16──▶ set aside ──back-off passed──▶ on probation
       ▲                                                      ▲ back-off doubled             │
       │                                                      └──────────failure─────────────┤
       └─────────────────────────────────success─────────────────────────────────────────────┘

On probation a subject gets one request at a time, the probe. A success ends the time set aside whenever it comes; a
failure during the back-off is one of a request that was placed before, and says nothing new. The back-off starts at its
first value again once 16 outcomes in a row were good.

A hand-off that failed does not say which side was at fault: it counts against the pair. It also counts against a worker
whose hand-offs failed with several partners since its last good one.

As the outlier detection of Envoy (envoyproxy.io, "Outlier detection"), except that nothing is ever excluded: placement
ranks what is set aside behind all else, so that with nobody else left the least bad one is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from tandem.types import Incarnation

IN_A_ROW = 3
WINDOW = 16
"""Outcomes that are remembered of a subject."""
MOST_OF_WINDOW = 8
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
SEVERAL_PARTNERS = 2

Pair: TypeAlias = tuple[Incarnation, Incarnation]
"""Prefill worker, decode worker."""
Subject: TypeAlias = Incarnation | Pair


class _Record:
    """Record of a subject that failed lately."""

    def __init__(self) -> None:
        self.outcomes: deque[bool] = deque(maxlen=WINDOW)
        """Outcomes since the subject was last set aside; True = success."""
        self.level = 0
        """How often it was set aside since it was last known to be well."""
        self.until_s: float | None = None
        """End of the back-off; None = healthy."""
        self.probe: int | None = None
        """The request that probes the subject now."""

    @property
    def num_in_a_row(self) -> int:
        """Failures since the last success."""
        return next((n for n, good in enumerate(reversed(self.outcomes)) if good), len(self.outcomes))

    @property
    def is_bad(self) -> bool:
        return self.num_in_a_row >= IN_A_ROW or self.outcomes.count(False) >= MOST_OF_WINDOW

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing left to remember."""
        if self.until_s is not None or False in self.outcomes:
            return False
        return self.level == 0 or len(self.outcomes) == WINDOW

    def on_probation(self, now_s: float) -> bool:
        return self.until_s is not None and now_s >= self.until_s

    def set_aside(self, now_s: float) -> None:
        self.level += 1
        self.until_s = now_s + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self.level - 1, WINDOW))
        self.probe = None
        self.outcomes.clear()


class Ejections:
    """Ejections of all workers of a router. Keeps only subjects that failed lately."""

    def __init__(self) -> None:
        self._records: dict[Subject, _Record] = {}
        self._failed_with: dict[Incarnation, set[Incarnation]] = {}
        """Partners with which a worker's hand-offs failed since its last good hand-off."""
        self._num_probes = 0

    def succeeded(self, subject: Subject) -> bool:
        """Notes a success. Returns whether the subject was set aside until now."""
        record = self._records.get(subject)
        if record is None:
            return False
        was_aside = record.until_s is not None
        record.until_s = record.probe = None
        record.outcomes.append(True)
        if record.is_clean:
            del self._records[subject]
        return was_aside

    def failed(self, subject: Subject, now_s: float) -> float | None:
        """Notes a failure. Returns for how long the subject is set aside, if that begins now."""
        record = self._records.setdefault(subject, _Record())
        if record.until_s is None:
            record.outcomes.append(False)
            if not record.is_bad:
                return None
        elif not record.on_probation(now_s):
            return None
        record.set_aside(now_s)
        assert record.until_s is not None
        return record.until_s - now_s

    def handed_off(self, prefill: Incarnation, decode: Incarnation) -> None:
        """A hand-off between these two was good. It is not yet a success of the workers."""
        self._failed_with.pop(prefill, None)
        self._failed_with.pop(decode, None)

    def blamed_for_handoff(self, prefill: Incarnation, decode: Incarnation) -> tuple[Subject, ...]:
        """Notes a failed hand-off between two workers. Returns the subjects that the failure counts against."""
        for worker, partner in ((prefill, decode), (decode, prefill)):
            self._failed_with.setdefault(worker, set()).add(partner)
        workers = (each for each in (prefill, decode) if len(self._failed_with[each]) >= SEVERAL_PARTNERS)
        return ((prefill, decode), *workers)

    def burden(self, subject: Subject, now_s: float) -> int:
        """0 if it may be given a request like any other, else how often in a row it was set aside."""
        record = self._records.get(subject)
        if record is None or record.until_s is None:
            return 0
        may_be_probed = record.on_probation(now_s) and record.probe is None
        return 0 if may_be_probed else record.level

    def burdens(self, now_s: float) -> Mapping[Incarnation, int]:
        """Returns the burdens of workers that are set aside."""
        burdens = {each: self.burden(each, now_s) for each in self._records if not isinstance(each, tuple)}
        return {worker: burden for worker, burden in burdens.items() if burden}

    def pair_burdens(self, now_s: float) -> Mapping[Pair, int]:
        """Returns the burdens of pairs that are set aside."""
        burdens = {each: self.burden(each, now_s) for each in self._records if isinstance(each, tuple)}
        return {pair: burden for pair, burden in burdens.items() if burden}

    def new_probe(self) -> int:
        """A number for a request."""
        self._num_probes += 1
        return self._num_probes

    def begin(self, subjects: Iterable[Subject], probe: int, now_s: float) -> None:
        """The request of this number was given to them; those on probation get no other one until `end`."""
        for record in filter(None, map(self._records.get, subjects)):
            if record.on_probation(now_s) and record.probe is None:
                record.probe = probe

    def end(self, subjects: Iterable[Subject], probe: int) -> None:
        """Ends a probe, whatever the outcome. Idempotent."""
        for record in filter(None, map(self._records.get, subjects)):
            if record.probe == probe:
                record.probe = None

    def forget(self, worker: Incarnation) -> None:
        """Forgets a worker that is gone, and its pairs."""
        self._failed_with.pop(worker, None)
        for partners in self._failed_with.values():
            partners.discard(worker)
        for subject in [each for each in self._records if worker in (each if isinstance(each, tuple) else (each,))]:
            del self._records[subject]

    def describe(self, subject: Subject, now_s: float) -> str:
        """For people: for how long it is set aside; empty if it is not."""
        record = self._records.get(subject)
        if record is None or record.until_s is None:
            return ""
        left_s = record.until_s - now_s
        return f"set aside for {left_s:.0f} s" if left_s > 0 else "set aside, to be probed"
