"""What one process shows on its admin port: the seam between it and the port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shell.rpc.health import HealthServicer
from tandem.cluster_status import ClusterStatus
from tandem.types import WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """What a router's `/status.json` says."""

    process: str = "router"
    cluster: ClusterStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a worker's `/status.json` says."""

    process: str
    """Its role."""
    version: str
    uptime_s: float
    ready: bool
    info: WorkerInfo
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """An admin port, for Prometheus' HTTP service discovery."""

    address: str
    role: str
    worker_id: str = ""
    """Empty for a router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContent:
    """Where the figures come from. Called on the loop, at each request: must neither block nor raise."""

    health: HealthServicer
    """The process's own, for the probes."""
    report: Callable[[], RouterReport | WorkerReport]
    history: Callable[[], object]
    """What `/history.json` says: see `History.report`."""
    metrics: Callable[[str], tuple[bytes, str]]
    """Body and content type of a scrape's answer; given what the scraper accepts, as its header says it."""
    targets: Callable[[], Sequence[ScrapeTarget]] | None = None
    """The admin ports for Prometheus; None on a worker, which knows no other process."""
