"""A cluster's status as text: the tables of `tandem status`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cli.table import printable, table
from tandem.client import ClusterStatus, RecentActivity, WorkerStatus

_LATENCY_NAMES = {"time_to_first_token": "time to first token", "inter_token": "between tokens"}


def render(status: ClusterStatus) -> str:
    """The whole status, for people."""
    parts = ["\n".join([headline(status), _requests(status)])]
    if any(latency.count for latency in status.recent.latencies):
        parts.append(latencies(status.recent))
    if not status.workers:
        return "\n".join([*parts, "no workers"])
    workers = sorted(status.workers, key=lambda worker: (worker.info.role, worker.info.worker_id))
    return "\n\n".join([*parts, _workers(workers), _pools(workers)])


def headline(status: ClusterStatus) -> str:
    """Which cluster, and whether it is well."""
    ready = "ready" if status.ready else f"not ready: {status.not_ready_reason}"
    return printable(f"model {status.model}, {ready}")


def latencies(recent: RecentActivity) -> str:
    """One line per latency that was measured lately."""
    return table(
        ["latency", "p50", "p90", "p99", "measured"],
        [
            (
                _LATENCY_NAMES.get(each.name, each.name.replace("_", " ")),
                *(duration(each.p50_s), duration(each.p90_s), duration(each.p99_s), each.count),
            )
            for each in recent.latencies
            if each.count
        ],
    )


def duration(seconds: float) -> str:
    """Three digits or so, with the unit that fits."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else span(seconds)


def span(seconds: float) -> str:
    """A stretch of time in its two largest units."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    days, rest_hours = divmod(hours, 24)
    if days:
        return f"{days} d {rest_hours} h"
    if hours:
        return f"{hours} h {rest_minutes} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def _requests(status: ClusterStatus) -> str:
    recent = status.recent
    lines = [
        f"requests: {status.active_requests} active, {status.queued_requests} queued"
        f" ({status.queued_tokens} prompt tokens)"
    ]
    if recent.total_requests:
        lines.append(
            f"since start: {recent.total_requests} requests, {recent.total_tokens} tokens; over the last"
            f" {recent.window_s:.0f} s: {recent.requests_per_s:.3g} requests/s, {recent.tokens_per_s:.3g} tokens/s"
        )
    if status.version:
        page = f", page at {status.admin_address}" if status.admin_address else ""
        lines.append(f"router: version {status.version}, up {span(status.uptime_s)}{page}")
    return "\n".join(lines)


def _workers(workers: Sequence[WorkerStatus]) -> str:
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


def _pools(workers: Sequence[WorkerStatus]) -> str:
    header = "blocks total free reserved receiving live quarantined block-size unused-slots"
    pools = [(worker.info.worker_id, worker.load.pool) for worker in workers]
    return table(
        header.split(),
        [
            (
                *(name, pool.total, pool.free, pool.reserved, pool.receiving),
                *(pool.live, pool.quarantined, pool.block_size, pool.unused_slots),
            )
            for name, pool in pools
        ],
    )
