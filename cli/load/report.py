"""What a load test found: per request, and summed up as percentiles, throughput, goodput. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from cli.load.workload import LoadOptions
from simulator.outcomes import quantile

_QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it; times count from its scheduled arrival."""

    at_s: float
    prompt_tokens: int
    arrivals: tuple[tuple[float, int], ...]
    """Time and number of tokens of each message that brought any."""
    e2e_s: float
    error: str
    """ErrorInfo reason, or empty."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Time to the first token; infinite if none came."""
        return self.arrivals[0][0] if self.arrivals else math.inf

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between messages with tokens: what a reader waits, tokens that come together count once."""
        return tuple(later - earlier for (earlier, _), (later, _) in pairwise(self.arrivals))

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first message; None if there was no other."""
        rest = sum(count for _, count in self.arrivals[1:])
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / rest if rest else None

    def meets(self, options: LoadOptions) -> bool:
        """Whether the request succeeded within the SLO."""
        itl_s = quantile(sorted(self.itl_s), 0.99) if self.itl_s else 0.0
        return (
            not self.error
            and (options.slo_ttft_s is None or self.ttft_s <= options.slo_ttft_s)
            and (options.slo_itl_s is None or itl_s <= options.slo_itl_s)
        )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds, summed up. `quantiles` belong to 0.5, 0.9, 0.95, 0.99."""

    count: int
    mean: float
    quantiles: tuple[float, ...]
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None of no values."""
        if not values:
            return None
        mean = math.fsum(values) / len(values)
        return cls(len(values), mean, tuple(quantile(sorted(values), each) for each in _QUANTILES), max(values))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of a load test."""

    options: LoadOptions
    model: str
    duration_s: float
    """First scheduled arrival to last end."""
    samples: tuple[Sample, ...]

    @property
    def succeeded(self) -> tuple[Sample, ...]:
        """Requests without an error; no other request has latencies."""
        return tuple(sample for sample in self.samples if not sample.error)

    @property
    def num_succeeded(self) -> int:
        """How many."""
        return len(self.succeeded)

    @property
    def latencies_s(self) -> dict[str, tuple[float, ...]]:
        """All values of each latency, by its name."""
        good = self.succeeded
        return {
            "ttft": tuple(sample.ttft_s for sample in good if sample.arrivals),
            "itl": tuple(gap for sample in good for gap in sample.itl_s),
            "tpot": tuple(sample.tpot_s for sample in good if sample.tpot_s is not None),
            "e2e": tuple(sample.e2e_s for sample in good),
        }

    @property
    def rates_per_s(self) -> dict[str, float]:
        """Throughput in requests and tokens, and goodput."""
        span_s = max(self.duration_s, 1e-9)
        return {
            "requests": self.num_succeeded / span_s,
            "prompt_tokens": sum(sample.prompt_tokens for sample in self.succeeded) / span_s,
            "output_tokens": sum(sample.num_tokens for sample in self.succeeded) / span_s,
            "goodput_requests": sum(sample.meets(self.options) for sample in self.samples) / span_s,
        }

    @property
    def errors(self) -> dict[str, int]:
        """How often each reason was given."""
        return dict(Counter(sample.error for sample in self.samples if sample.error))

    def as_text(self) -> str:
        """For people."""
        rates = self.rates_per_s
        lines = [
            f"model {self.model}: {self.num_succeeded} of {len(self.samples)} requests in {self.duration_s:.2f} s, "
            f"{self._load()}",
            *(f"  failed with {reason}: {count}" for reason, count in sorted(self.errors.items())),
            f"throughput: {rates['requests']:.2f} requests/s, {rates['prompt_tokens']:.0f} prompt tokens/s, "
            f"{rates['output_tokens']:.0f} output tokens/s",
            f"goodput: {rates['goodput_requests']:.2f} requests/s within {self._slo()}",
            f"{'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}{'max':>10}",
        ]
        for name, values in self.latencies_s.items():
            if (found := Distribution.of(values)) is not None:
                figures = (found.mean, *found.quantiles, found.maximum)
                lines.append(f"{name:<6}" + "".join(f"{figure * 1e3:>10.2f}" for figure in figures))
        return "\n".join(lines)

    def as_json(self) -> str:
        """Everything, for programs; times in seconds."""
        document: dict[str, Any] = {
            "options": asdict(self.options),
            "model": self.model,
            "duration_s": self.duration_s,
            "errors": self.errors,
            "rates_per_s": self.rates_per_s,
            "latencies_s": {name: _named(Distribution.of(values)) for name, values in self.latencies_s.items()},
            "requests": [asdict(sample) for sample in self.samples],
        }
        return json.dumps(document, indent=2)

    def _load(self) -> str:
        if self.options.rate_per_s is None:
            return f"closed loop of {self.options.concurrency}"
        return f"open loop at {self.options.rate_per_s:g}/s ({self.options.arrivals})"

    def _slo(self) -> str:
        limits = (("ttft", self.options.slo_ttft_s), ("itl p99", self.options.slo_itl_s))
        return ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in limits if limit is not None) or "no SLO"


def _named(found: Distribution | None) -> dict[str, float] | None:
    if found is None:
        return None
    quantiles = {f"p{each * 100:g}": value for each, value in zip(_QUANTILES, found.quantiles, strict=True)}
    return {"count": found.count, "mean": found.mean, **quantiles, "max": found.maximum}
