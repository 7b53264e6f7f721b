"""What `tandem status --explain` says: per automatic choice what was chosen, why, and how to force it; and of the last
requests how many were split between two workers, and why not the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import ConsoleRenderable

from cli.status_view import duration
from cli.terminal import plain
from tandem.client import ClusterStatus
from tandem.decision import Decision
from tandem.types import WorkerLoad

SPLIT_ALL = "to split every prompt that is not short: tandem serve --prefill N --decode N"


def explain(status: ClusterStatus) -> Iterator[ConsoleRenderable]:
    """Yields lines: the router's choices, those of each group of equal workers, of each pair, and of requests."""
    yield from _chosen("router", status.decisions)
    groups: dict[tuple[Decision, ...], list[str]] = {}
    for worker in status.workers:
        groups.setdefault(worker.info.decisions, []).append(worker.info.worker_id)
    for decisions, names in groups.items():
        yield from _chosen(", ".join(names), decisions)
    for worker in status.workers:
        yield plain(f"{worker.info.worker_id} now: {_now(worker.load)}")
    yield plain("hand-offs between workers (--transport):" if status.handoffs else "no hand-off between workers yet")
    for pair in status.handoffs:
        over = f"; passed over: {pair.passed_over}" if pair.passed_over else ""
        took = f"{pair.count}, median {duration(pair.median_s)}, {pair.num_bytes / 1e6:.1f} MB"
        yield plain(f"  {pair.source} to {pair.target}: {pair.transport or 'not known'}, {took}{over}")
    yield from _requests(status)


def _chosen(who: str, decisions: tuple[Decision, ...]) -> Iterator[ConsoleRenderable]:
    yield plain(f"{who}:")
    for each in decisions:
        yield plain(f"  {each.name}: {each.value}; why: {each.why}; forced by: {each.force}")


def _now(load: WorkerLoad) -> str:
    objective = (
        f"steps of at most {duration(load.step_objective_s)}" if load.step_objective_s else "no step objective known"
    )
    return f"{objective}, chunks of at most {load.chunk_tokens} prompt tokens, {load.steps_per_s:.3g} steps/s"


def _requests(status: ClusterStatus) -> Iterator[ConsoleRenderable]:
    recent = status.recent
    if not recent.num_last:
        yield plain("no request has ended yet")
        return
    yield plain(
        f"of the last {recent.num_last} requests {recent.num_split} were split: prompt on one worker, decode on another"
    )
    for each in recent.last_placements:
        yield plain(f"  {each.count}: {each.text}")
    if recent.num_split < recent.num_last:
        yield plain(f"  {SPLIT_ALL}")
