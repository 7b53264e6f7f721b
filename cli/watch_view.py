"""What `tandem status --watch` shows at one moment, as lines no wider than the terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cli.pool_bar import Glyphs, pool_bar
from cli.status_view import headline, latencies, span
from cli.table import printable, table
from tandem.client import ClusterStatus, WorkerStatus
from tandem.types import Incarnation

_BAR_BOUNDS = (8, 60)
_ROLE_ORDER = {"prefill": 0, "decode": 1}


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between two looks; None = not known yet."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    steps_per_s: Mapping[Incarnation, float] = field(default_factory=dict)


def rates_between(before: ClusterStatus | None, now: ClusterStatus) -> Rates:
    """From what two looks tell; a router that started anew in between has no past."""
    if before is None or now.uptime_s <= before.uptime_s:
        return Rates()
    passed_s = now.uptime_s - before.uptime_s
    steps = {worker.info.incarnation: worker.load.engine_steps for worker in before.workers}
    return Rates(
        (now.recent.total_requests - before.recent.total_requests) / passed_s,
        (now.recent.total_tokens - before.recent.total_tokens) / passed_s,
        {
            worker.info.incarnation: (worker.load.engine_steps - steps[worker.info.incarnation]) / passed_s
            for worker in now.workers
            if worker.info.incarnation in steps
        },
    )


@dataclass(frozen=True, slots=True)
class Moment:
    """All that one frame is made of."""

    target: str
    clock: str
    """Time of day."""
    status: ClusterStatus | None
    """The last one that came; None = none yet."""
    rates: Rates
    silent_s: float | None = None
    """How long the router has not answered; None = it just has."""
    trouble: str = ""
    """Why it does not."""


def frame(moment: Moment, width: int, glyphs: Glyphs) -> list[str]:
    """The lines, from the top."""
    lines = [_spread(f"tandem {moment.target}", moment.clock, width)]
    if moment.silent_s is not None:
        lines.append(printable(f"unreachable for {span(moment.silent_s)}: {moment.trouble}"))
    if moment.status is not None:
        lines += _body(moment.status, moment.rates, width, glyphs)
    return [_cut(line, width, glyphs) for line in lines]


def fit(lines: Sequence[str], height: int) -> list[str]:
    """As many lines as there is room for; the last says how many are missing."""
    if len(lines) <= height:
        return list(lines)
    return [*lines[: height - 1], f"({len(lines) - height + 1} more lines)"]


def _body(status: ClusterStatus, rates: Rates, width: int, glyphs: Glyphs) -> list[str]:
    lines = [
        _spread(headline(status), f"version {status.version}, up {span(status.uptime_s)}", width),
        f"{status.active_requests} active, {status.queued_requests} queued ({status.queued_tokens} prompt tokens), "
        f"{_rate(rates.requests_per_s)} requests/s, {_rate(rates.tokens_per_s)} tokens/s",
    ]
    if any(each.count for each in status.recent.latencies):
        lines += ["", *latencies(status.recent).splitlines()]
    if not status.workers:
        return [*lines, "", "no workers"]
    return [*lines, "", *_workers(status.workers, rates, width, glyphs), "", glyphs.legend()]


def _workers(workers: Sequence[WorkerStatus], rates: Rates, width: int, glyphs: Glyphs) -> list[str]:
    ordered = sorted(workers, key=lambda each: (_ROLE_ORDER.get(each.info.role, 2), each.info.worker_id))
    header = ["worker", "state", "heard", "run", "wait", "prompt", "xfer", "preempt", "steps/s", "used"]
    rows = table(header, [_row(each, rates) for each in ordered]).splitlines()
    room = width - max(map(len, rows)) - 2
    if room < _BAR_BOUNDS[0]:
        return rows
    bars = ["pool", *(pool_bar(each.load.pool, min(room, _BAR_BOUNDS[1]), glyphs) for each in ordered)]
    longest = max(map(len, rows))
    return [f"{row.ljust(longest)}  {bar}" for row, bar in zip(rows, bars, strict=True)]


def _row(worker: WorkerStatus, rates: Rates) -> tuple[object, ...]:
    load, pool = worker.load, worker.load.pool
    used = 100 * (pool.total - pool.free) / pool.total if pool.total else 0.0
    return (
        *(worker.info.worker_id, worker.state, f"{worker.heartbeat_age_s:.1f} s"),
        *(load.running_seqs, load.waiting_seqs, load.queued_prompt_tokens, load.live_transfers, load.preemptions),
        *(_rate(rates.steps_per_s.get(worker.info.incarnation)), f"{used:.0f} %"),
    )


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _spread(left: str, right: str, width: int) -> str:
    """Both ends of a line; the left one where there is no room for both."""
    gap = width - len(left) - len(right)
    return f"{left}{' ' * gap}{right}" if gap >= 2 else left


def _cut(line: str, width: int, glyphs: Glyphs) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}{glyphs.ellipsis}"
