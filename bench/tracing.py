"""What tracing costs those who are served: `python -m bench.tracing`.

Four clusters in one run, all of them idle but the one whose turn it is: without traces (twice, so that
the two differ by noise alone), with a collector, and with one that takes spans and never answers.
Each round gives every cluster the same load, in another order; a ratio is taken within its round, to
the first cluster, and the median of the rounds counts. Every request is traced. Prefix caches are off, since all
rounds ask the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

from bench.cluster import serve
from bench.load import run
from bench.record import write_record
from bench.report import LoadReport, quantile
from bench.workload import LoadOptions
from tandem.client import Client

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
OFF, AGAIN, LIVE, HANGING = "off", "off, once more", "a collector", "a collector that hangs"
_READY_S = 60.0
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One cluster's under one load."""

    tokens_per_s: float
    first_token_p50_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float

    @classmethod
    def of(cls, report: LoadReport) -> Figures:
        """Raises RuntimeError if a request failed."""
        if report.errors:
            raise RuntimeError(f"requests failed: {report.errors}")
        latencies = report.latencies_s
        return cls(
            tokens_per_s=report.rates_per_s["output_tokens"],
            first_token_p50_ms=quantile(latencies["ttft"], 0.5) * 1e3,
            inter_token_p50_ms=quantile(latencies["itl"], 0.5) * 1e3,
            inter_token_p99_ms=quantile(latencies["itl"], 0.99) * 1e3,
        )

    def over(self, other: Figures) -> Figures:
        """Each as a ratio."""
        pairs = zip(asdict(self).items(), asdict(other).values(), strict=True)
        return Figures(**{name: mine / theirs for (name, mine), theirs in pairs})


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of cluster, over all rounds."""

    tracing: str
    median: Figures
    ratio: Figures
    """To the first kind: median of the rounds' ratios."""
    lowest_ratio: Figures
    highest_ratio: Figures


def measure(options: LoadOptions, callers: Sequence[int], num_rounds: int) -> dict[str, object]:
    """Figures of every kind under each number of callers, and how many spans the live collector got."""
    with ExitStack() as stack:
        live, hanging = stack.enter_context(_collector()), stack.enter_context(_collector("--hang"))
        with ExitStack() as clusters:
            endpoints = {OFF: "", AGAIN: "", LIVE: live.endpoint, HANGING: hanging.endpoint}
            targets = {kind: clusters.enter_context(_served(endpoint)) for kind, endpoint in endpoints.items()}
            loads = [_load(targets, replace(options, concurrency=each), num_rounds) for each in callers]
        num_spans = int(live.end())
    return {
        "requests": options.num_requests,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "rounds": num_rounds,
        "spans": num_spans,
        "loads": loads,
    }


def _load(targets: dict[str, str], options: LoadOptions, num_rounds: int) -> dict[str, object]:
    print(f"{options.concurrency} callers", flush=True)
    rounds = [_round(targets, replace(options, seed=number), number) for number in range(num_rounds)]
    return {"callers": options.concurrency, "rows": [asdict(_row(kind, rounds)) for kind in targets]}


def _round(targets: dict[str, str], options: LoadOptions, number: int) -> dict[str, Figures]:
    kinds = list(targets)
    shift = number % len(kinds)
    found = {}
    for kind in kinds[shift:] + kinds[:shift]:
        found[kind] = Figures.of(run(targets[kind], options, _TIMEOUT_S))
        print(f"round {number}, {kind}: {found[kind].tokens_per_s:.0f} tokens/s", flush=True)
    return found


def _row(kind: str, rounds: Sequence[dict[str, Figures]]) -> Row:
    ratios = [each[kind].over(each[OFF]) for each in rounds]
    return Row(
        tracing=kind,
        median=_each(statistics.median, [each[kind] for each in rounds]),
        ratio=_each(statistics.median, ratios),
        lowest_ratio=_each(min, ratios),
        highest_ratio=_each(max, ratios),
    )


def _each(summary: Callable[[Sequence[float]], float], figures: Sequence[Figures]) -> Figures:
    return Figures(**{name: summary([getattr(each, name) for each in figures]) for name in asdict(figures[0])})


class _Collector:
    """One in a process of its own, so that it shares no interpreter with the callers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.endpoint = process.stdout.readline().strip()

    def end(self) -> str:
        """Stops it; returns its last words: how many spans came."""
        return self._process.communicate()[0]


@contextmanager
def _collector(*options: str) -> Iterator[_Collector]:
    command = [sys.executable, "-m", "bench.collector", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        collector = _Collector(process)
        try:
            yield collector
        finally:
            if process.poll() is None:
                collector.end()


@contextmanager
def _served(endpoint: str) -> Iterator[str]:
    """A cluster that exports to `endpoint`, or does not trace if that is empty; its address."""
    before = os.environ.pop(ENDPOINT, None)
    if endpoint:
        os.environ[ENDPOINT] = endpoint
    try:
        cluster = serve("demo", "--no-prefix-cache", "--log-level", "error")
        with cluster as started:
            os.environ.pop(ENDPOINT, None)
            with Client(started.target) as client:
                client.wait_ready(_READY_S)
            yield started.target
    finally:
        os.environ.pop(ENDPOINT, None)
        if before is not None:
            os.environ[ENDPOINT] = before


def main() -> int:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 16], help="one table for each")
    parser.add_argument("--requests", type=int, default=32, help="of each cluster in each round")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=16)
    arguments = parser.parse_args()
    options = LoadOptions(
        rate_per_s=None,
        concurrency=1,
        num_requests=arguments.requests,
        num_warmup=4,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
    )
    write_record("tracing", measure(options, arguments.callers, arguments.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
