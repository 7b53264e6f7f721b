"""A cluster's status for people: the tables of `tandem status`, and what `--watch` shows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias

from rich.console import ConsoleRenderable
from rich.table import Table
from rich.text import Text

from cli.pool_bar import Legend, PoolBar
from cli.terminal import plain, table
from tandem.client import ClusterStatus, RecentActivity, WorkerStatus
from tandem.types import PoolCounts

_Columns: TypeAlias = dict[str, Callable[[WorkerStatus], object]]
_LATENCY_NAMES = {"time_to_first_token": "time to first token", "inter_token": "between tokens"}

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
        for name in "total free reserved receiving live quarantined block_size unused_slots".split()
    },
}
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
    """Which cluster, whether it serves, its requests and latencies."""
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
    if status.version:
        page = f", page at {status.admin_address}" if status.admin_address else ""
        yield plain(f"router: version {status.version}, up {span(status.uptime_s)}{page}")
    yield Text()
    if any(each.count for each in recent.latencies):
        yield _latencies(recent)
        yield Text()
    if not status.workers:
        yield plain("no workers")


def _latencies(recent: RecentActivity) -> Table:
    """Those that were measured in the last minute."""
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


def _used(pool: PoolCounts) -> str:
    return f"{100 * (pool.total - pool.free) / pool.total if pool.total else 0.0:.0f} %"
