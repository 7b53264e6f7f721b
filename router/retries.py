"""What the failed tries of one request say of the next one: where it may run, when, and whether there is one. Pure.

    failed   a worker, a hand-off or a step failed: a try of `max_retries`
    lost     a worker of the pair is gone: no try, for the request may go on wherever its tokens can be computed again.
             A request that ends its workers must not end all of them: beyond `max_retries` each loss makes the pause
             before the next try ten times as long, up to the time in which a worker is replaced

Progress makes all of it undone.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.placement import Placement
from tandem.errors import InternalError, Overloaded, TandemError, TransferError
from tandem.types import Incarnation, WorkerInfo

_MAX_REPLAYS_OF_BROKEN = 1
"""A request that breaks on two workers is at fault itself."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a request waits for what, and how often it is tried again."""

    max_retries: int = 2
    """Further pairs tried after the first; beyond these, workers that were not tried yet."""
    patience_s: float = 10.0
    """Wait for a pair of workers to be there: as long as a worker takes to be replaced."""
    silence_s: float = 120.0
    """Longest time without a word about a request from one of the workers that hold it. Where it waits, they say so
    every few seconds (`worker.core`)."""
    progress_tokens: int = 16
    """New tokens of one choice by which a pair that failed was still a good one: tries are counted from 0 again.

    More than one: prefill gives a token even where no hand-off works. Not much more, but enough that a request
    which ends its workers after a token or two is slowed down."""
    total_s: float = 3600.0
    """Deadline of a request that brings none, or a later deadline."""
    backoff_s: float = 0.1
    """Pause before a full worker is asked again, times the number of tries; a tenth of the first pause after losses."""


class Retries:
    """Tries of a request since its last progress."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.blamed: set[Incarnation] = set()
        """Workers that failed the request. Placement takes them last."""
        self._culprits: set[Incarnation] = set()
        """Workers that failed the request on their own, not in a hand-off."""
        self._num_failed = 0
        self._num_broken = 0
        """Tries that a broken step failed."""
        self._num_lost = 0

    @property
    def are_spent(self) -> bool:
        """Whether only workers that were not tried yet may do better."""
        return self._num_failed > self._policy.max_retries

    def count(
        self, error: TandemError, culprit: WorkerInfo, placement: Placement, *, lost: bool, progress: int
    ) -> bool:
        """Takes one failure; returns whether the request may be tried again.

        `lost`: whether a worker of the pair is gone. `progress`: new tokens of the choice that got on most.
        """
        if progress >= self._policy.progress_tokens:
            self._num_failed = self._num_broken = self._num_lost = 0
            self.blamed.clear()
            self._culprits.clear()
        # A hand-off that failed does not say which side was at fault; any other failure is its worker's own.
        if isinstance(error, TransferError):
            self.blamed.update(placement.incarnations)
        else:
            self.blamed.add(culprit.incarnation)
            self._culprits.add(culprit.incarnation)
        if isinstance(error, InternalError):
            self._num_broken += 1
        elif lost:
            self._num_lost += 1
            return True
        self._num_failed += 1
        return self._num_broken <= _MAX_REPLAYS_OF_BROKEN

    def pause_s(self, error: TandemError) -> float:
        """Returns how long to wait before the next try, after this failure."""
        if isinstance(error, Overloaded):
            return self._policy.backoff_s * self._num_failed
        num_more = self._num_lost - self._policy.max_retries
        longest_s = self._policy.patience_s
        return min(longest_s, self._policy.backoff_s * 10.0 ** min(num_more, 9)) if num_more > 0 else 0.0

    def may_take(self, placement: Placement) -> bool:
        """Whether the pair may do better than all before: if it does not, more are blamed, so that tries end."""
        if not self.are_spent:
            return True
        incarnations = placement.incarnations
        return self._culprits.isdisjoint(incarnations) and not self.blamed.issuperset(incarnations)
