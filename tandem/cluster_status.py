"""What one router knows of its cluster, as plain data: GetStatus, the admin port and the clients say the same.

`asdict` of it is what `tandem status --json` prints. Knows nothing of protobuf (see `convert`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.types import WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Quantiles of a latency over the window; 0 without a sample."""

    name: str
    count: int
    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """State of a worker, as its router sees the worker."""

    info: WorkerInfo
    load: WorkerLoad
    heartbeat_age_s: float
    connected: bool
    """Whether the router's stream to the worker is open."""
    set_aside: str = ""
    """Text for people, where the worker gets no work as long as others are left; else empty."""
    set_apart: str = ""
    """Why the worker gets no new requests: its model or KV layout differs from that of the workers that serve."""

    @property
    def state(self) -> str:
        """For people: `not connected`, `draining`, `set apart`, `set aside …` or `serving`."""
        if not self.connected:
            return "not connected"
        if self.load.draining:
            return "draining"
        return "set apart" if self.set_apart else self.set_aside or "serving"


@dataclass(frozen=True, slots=True)
class PlacementCount:
    """Number of requests placed for a reason; named as `PlacementReason`."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class RecentActivity:
    """What a router saw lately, and in all. See cluster.proto for each field."""

    window_s: float = 0.0
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    latencies: tuple[LatencySummary, ...] = ()
    total_requests: int = 0
    total_tokens: int = 0
    placements: tuple[PlacementCount, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """Status of a cluster, as known to a router."""

    model: str
    ready: bool
    not_ready_reason: str
    """Why `ready` is false; else empty."""
    queued_requests: int
    queued_tokens: int
    active_requests: int
    workers: tuple[WorkerStatus, ...]
    version: str = ""
    uptime_s: float = 0.0
    admin_address: str = ""
    """HOST:PORT of the router's admin port; empty without an admin port."""
    recent: RecentActivity = field(default_factory=RecentActivity)
