"""A cluster's status for people: the tables of `tandem status`, and the parts that `--watch` shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import ConsoleRenderable
from rich.table import Table
from rich.text import Text

from cli.terminal import plain, table
from tandem.client import ClusterStatus, RecentActivity, WorkerStatus

_LATENCY_NAMES = {"time_to_first_token": "time to first token", "inter_token": "between tokens"}


def view(status: ClusterStatus) -> Iterator[ConsoleRenderable]:
    """The whole status, part by part."""
    yield headline(status)
    yield from _requests(status)
    yield from latencies(status.recent)
    yield Text()
    if not status.workers:
        yield plain("no workers")
        return
    workers = sorted(status.workers, key=lambda worker: (worker.info.role, worker.info.worker_id))
    yield _workers(workers)
    yield Text()
    yield _pools(workers)


def headline(status: ClusterStatus) -> Text:
    """Which cluster, and whether it serves."""
    return plain(f"model {status.model}, {'ready' if status.ready else f'not ready: {status.not_ready_reason}'}")


def latencies(recent: RecentActivity) -> Iterator[ConsoleRenderable]:
    """One line for each latency of the last minute, below an empty one; nothing if there is none."""
    rows = [
        (
            *(_LATENCY_NAMES.get(each.name, each.name.replace("_", " ")), duration(each.p50_s)),
            *(duration(each.p90_s), duration(each.p99_s), each.count),
        )
        for each in recent.latencies
        if each.count
    ]
    if rows:
        yield Text()
        yield table(["latency", "p50", "p90", "p99", "measured"], rows)


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


def _requests(status: ClusterStatus) -> Iterator[Text]:
    recent = status.recent
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


def _workers(workers: Sequence[WorkerStatus]) -> Table:
    header = "worker role address pid device state heartbeat steps running waiting prompt-tokens transfers preempted"
    return table(
        header.split(),
        [
            (
                *(worker.info.worker_id, worker.info.role, worker.info.address, worker.info.pid, worker.info.device),
                *(worker.state, f"{worker.heartbeat_age_s:.1f} s ago", worker.load.engine_steps),
                *(worker.load.running_seqs, worker.load.waiting_seqs, worker.load.queued_prompt_tokens),
                *(worker.load.live_transfers, worker.load.preemptions),
            )
            for worker in workers
        ],
    )


def _pools(workers: Sequence[WorkerStatus]) -> Table:
    header = "blocks total free reserved receiving live quarantined block-size unused-slots"
    return table(
        header.split(),
        [
            (
                *(worker.info.worker_id, pool.total, pool.free, pool.reserved, pool.receiving),
                *(pool.live, pool.quarantined, pool.block_size, pool.unused_slots),
            )
            for worker in workers
            for pool in (worker.load.pool,)
        ],
    )
