"""A cluster's status for people: the tables of `tandem status`, and what `--watch` shows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cli.terminal import plain, table
from tandem.client import ClusterStatus, RecentActivity, WorkerStatus
from tandem.types import PoolCounts

_Columns: TypeAlias = dict[str, Callable[[WorkerStatus], object]]
_LATENCY_NAMES = {"time_to_first_token": "time to first token", "inter_token": "between tokens"}

_STATES = (
    ("live", "█", "#", "green"),
    ("receiving", "▓", "+", "cyan"),
    ("reserved", "▒", "-", "blue"),
    ("quarantined", "×", "x", "red"),
    ("cached", "░", ":", "magenta"),
    ("free", "·", ".", "dim"),
)
"""Field of PoolCounts, its character, the same for terminals without Unicode, style."""
_NARROWEST, _WIDEST = 8, 60

_WORKER: _Columns = {
    "worker": lambda worker: worker.info.worker_id,
    "role": lambda worker: worker.info.role,
    "address": lambda worker: worker.info.address,
    "pid": lambda worker: worker.info.pid,
    "device": lambda worker: worker.info.device,
    "state": lambda worker: worker.state,
    "heartbeat": lambda worker: f"{worker.heartbeat_age_s:.1f} s ago",
    "steps": lambda worker: worker.load.engine_steps,
    "running": lambda worker: worker.load.running_seqs,
    "waiting": lambda worker: worker.load.waiting_seqs,
    "prompt-tokens": lambda worker: worker.load.queued_prompt_tokens,
    "transfers": lambda worker: worker.load.live_transfers,
    "preempted": lambda worker: worker.load.preemptions,
}
_POOL: _Columns = {
    "blocks": lambda worker: worker.info.worker_id,
    **{
        name.replace("_", "-"): attrgetter(f"load.pool.{name}")
        for name in "total free cached reserved receiving live quarantined block_size unused_slots".split()
    },
}
_PACE: _Columns = {
    "pace": lambda worker: worker.info.worker_id,
    "prompts": lambda worker: _measured(worker.load.prompt_tokens_per_s, lambda rate: f"{rate:.0f} tokens/s"),
    "decode step": lambda worker: _measured(worker.load.step_s, duration),
    "step objective": lambda worker: _measured(
        worker.load.step_objective_s, lambda s: f"at most {duration(s)}", "none"
    ),
}
"""Columns on a worker's present speed, which placement uses."""
_LIVE: _Columns = {
    **{name: _WORKER[name] for name in ("worker", "state", "heartbeat", "running", "waiting", "transfers")},
    "used": lambda worker: _used(worker.load.pool),
    "pool": lambda worker: PoolBar(worker.load.pool),
}
"""As much as a terminal of 80 columns has room for."""


def view(status: ClusterStatus) -> Iterator[ConsoleRenderable]:
    """The whole status, part by part."""
    yield from _summary(status)
    if status.workers:
        yield _table(_WORKER, status.workers)
        yield Text()
        yield _table(_POOL, status.workers)
        yield Text()
        yield _table(_PACE, status.workers)


def live_view(status: ClusterStatus) -> Iterator[ConsoleRenderable]:
    """What changes from moment to moment."""
    yield from _summary(status)
    if status.workers:
        yield _table(_LIVE, status.workers)
        yield Text()
        yield Legend()


def duration(seconds: float) -> str:
    """Three digits or so, with the unit that fits."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else span(seconds)


def span(seconds: float) -> str:
    """A duration in its two largest units."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    days, rest_hours = divmod(hours, 24)
    if days:
        return f"{days} d {rest_hours} h"
    if hours:
        return f"{hours} h {rest_minutes} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def _summary(status: ClusterStatus) -> Iterator[ConsoleRenderable]:
    """Yields the cluster's name, readiness, requests and latencies."""
    recent = status.recent
    yield plain(f"model {status.model}, {'ready' if status.ready else f'not ready: {status.not_ready_reason}'}")
    yield plain(
        f"requests: {status.active_requests} active, {status.queued_requests} queued"
        f" ({status.queued_tokens} prompt tokens)"
    )
    if recent.total_requests:
        yield plain(
            f"since start: {recent.total_requests} requests, {recent.total_tokens} tokens; over the last"
            f" {recent.window_s:.0f} s: {recent.requests_per_s:.3g} requests/s, {recent.tokens_per_s:.3g} tokens/s"
        )
    if recent.placements:
        counts = ", ".join(f"{each.reason.replace('_', ' ')} {each.count}" for each in recent.placements)
        yield plain(f"prompts placed since start: {counts}")
    if status.version:
        page = f", page at {status.admin_address}" if status.admin_address else ""
        yield plain(f"router: version {status.version}, up {span(status.uptime_s)}{page}")
    for worker in status.workers:
        if worker.set_apart:
            yield plain(f"{worker.info.worker_id} is set apart: {worker.set_apart}")
    yield Text()
    if any(each.count for each in recent.latencies):
        yield _latencies(recent)
        yield Text()
    if not status.workers:
        yield plain("no workers")


def _latencies(recent: RecentActivity) -> Table:
    rows = [
        (
            *(_LATENCY_NAMES.get(each.name, each.name.replace("_", " ")), duration(each.p50_s)),
            *(duration(each.p90_s), duration(each.p99_s), each.count),
        )
        for each in recent.latencies
        if each.count
    ]
    return table(("latency", "p50", "p90", "p99", "measured"), rows)


def _table(columns: _Columns, workers: Sequence[WorkerStatus]) -> Table:
    ordered = sorted(workers, key=lambda worker: (worker.info.role, worker.info.worker_id))
    return table(tuple(columns), [tuple(value(worker) for value in columns.values()) for worker in ordered])


def _measured(value: float, text: Callable[[float], str], otherwise: str = "not measured") -> str:
    return text(value) if value else otherwise


def _used(pool: PoolCounts) -> str:
    return f"{100 * pool.num_used / (pool.total or 1):.0f} %"


@dataclass(frozen=True, slots=True)
class PoolBar:
    """A KV pool as a bar of characters, one kind for each state of blocks.

    As wide as there is room, within bounds; a state that has any blocks gets at least one character.
    """

    pool: PoolCounts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST)
        bar = Text(no_wrap=True, end="")
        for state, character, ascii_character, style in _STATES[:-1]:
            count = getattr(self.pool, state)
            cells = max(1, round(width * count / self.pool.total)) if count else 0
            bar.append((ascii_character if options.ascii_only else character) * cells, style)
        bar.truncate(width)
        _, free, ascii_free, style = _STATES[-1]
        yield bar.append((ascii_free if options.ascii_only else free) * (width - len(bar)), style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_NARROWEST, options.max_width), min(_WIDEST, options.max_width))


class Legend:
    """What the characters of a bar mean."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = ((f"{short if options.ascii_only else long} {state}", style) for state, long, short, style in _STATES)
        yield Text("  ").join(Text(text, style) for text, style in parts)
