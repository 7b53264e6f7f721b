"""What callers met, and whether it is what they were promised: attainment and goodput.

A request attains its objectives if it ends well, its first token comes in time, counted from when it was due, and the
95th percentile of its own gaps between tokens is short enough, if it has any.
Goodput is the rate of such requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GOOD_SHARE = 0.9
"""Share of the requests that must attain their objectives."""
_GAP_QUANTILE = 0.95


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of every request."""

    ttft_s: float
    itl_s: float
    """For the 95th percentile of a request's own gaps."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    """Seconds to the first token; None = the request failed before."""
    itl_s: float | None
    """95th percentile of the gaps between tokens; None = there are no gaps."""
    ended_s: float
    failed: bool = False
    replays: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was found on the worker that computed the prompt."""

    def misses_first(self, slo: Slo) -> bool:
        """Whether the first token came late or never."""
        return self.ttft_s is None or self.ttft_s > slo.ttft_s

    def misses_between(self, slo: Slo) -> bool:
        """Whether gaps were too long."""
        return self.itl_s is not None and self.itl_s > slo.itl_s

    def attains(self, slo: Slo) -> bool:
        """Whether the request met both objectives."""
        return not (self.failed or self.misses_first(slo) or self.misses_between(slo))


@dataclass(frozen=True, slots=True)
class RoleUse:
    """Use of all workers of one role."""

    workers: int
    busy_share: float
    """Share of the workers' time in steps."""
    prompt_share: float
    """Share of the workers' time for prompt tokens."""
    queued_tokens: float = 0.0
    """Prompt tokens that wait at a worker, on average over time and workers."""
    pool_share: float = 0.0
    """Share of a pool in use, on average over time and workers."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one simulation."""

    outcomes: Sequence[Outcome]
    """In order of arrival."""
    span_s: float
    """From the first arrival to the last end."""
    offered_per_s: float
    uses: dict[str, RoleUse] = field(default_factory=dict)
    placements: dict[str, int] = field(default_factory=dict)
    """How many, by reason."""
    handoff_bytes: int = 0
    num_lost: int = 0
    """Workers that were lost."""

    def attainment(self, slo: Slo) -> float:
        """Share of all requests."""
        return sum(each.attains(slo) for each in self.outcomes) / len(self.outcomes)

    def goodput_per_s(self, slo: Slo) -> float:
        """Attaining requests per second, at the offered rate."""
        return self.offered_per_s * self.attainment(slo)

    def document(self, slo: Slo) -> dict[str, object]:
        """For JSON."""
        good = [each for each in self.outcomes if not each.failed]
        return {
            "requests": len(self.outcomes),
            "failed": len(self.outcomes) - len(good),
            "replays": sum(each.replays for each in self.outcomes),
            "workers_lost": self.num_lost,
            "span_s": self.span_s,
            "offered_per_s": self.offered_per_s,
            "attainment": self.attainment(slo),
            "goodput_per_s": self.goodput_per_s(slo),
            "missed_first": sum(each.misses_first(slo) for each in self.outcomes),
            "missed_between": sum(each.misses_between(slo) for each in self.outcomes),
            "ttft_s": percentiles([each.ttft_s for each in good if each.ttft_s is not None]),
            "itl_p95_s": percentiles([each.itl_s for each in good if each.itl_s is not None]),
            "cached_share": sum(each.cached_tokens for each in self.outcomes)
            / max(1, sum(each.prompt_tokens for each in self.outcomes)),
            "handoff_bytes": self.handoff_bytes,
            "use": {
                role: {"workers": use.workers, "busy": use.busy_share, "prompts": use.prompt_share}
                for role, use in self.uses.items()
            },
            "placements": self.placements,
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The usual ones; empty if there is none."""
    if not values:
        return {}
    ordered = sorted(values)
    return {f"p{share:g}": quantile(ordered, share / 100) for share in (50, 75, 90, 95, 99)}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns a quantile of ascending values, not empty; linear between neighbours (type 7)."""
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def gap_p95(times_s: Sequence[float]) -> float | None:
    """Returns the 95th percentile of the gaps between a request's tokens; None without a gap."""
    gaps = sorted(after - before for before, after in pairwise(times_s))
    return quantile(gaps, _GAP_QUANTILE) if gaps else None
