"""Paired measurements: the geometric mean of the rounds' ratios with its 95 % interval. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Ratio:
    """After by before over all rounds."""

    mean: float
    """Geometric."""
    low: float
    high: float
    """Ends of the 95 % interval (Student's t of the ratios' logarithms)."""
    rounds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired_ratio(before: Sequence[float], after: Sequence[float]) -> Ratio | None:
    """Returns the ratio over the rounds in which both are above 0; None of fewer than two such rounds."""
    logs = [math.log(now / then) for then, now in zip(before, after, strict=True) if then > 0 and now > 0]
    if len(logs) < 2:
        return None
    mean = statistics.fmean(logs)
    half = student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def student_t(freedom: int) -> float:
    """Returns the 97.5 % quantile of Student's t: exact for 1 and 2, else within 0.5 % (Hill's expansion)."""
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 / math.sqrt(2 * 0.975 * 0.025)
    terms = (
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
    )
    return _Z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
