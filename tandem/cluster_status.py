"""What one router knows of its cluster, as plain data: GetStatus, the admin port and the clients say the same.

`asdict` of it is what `tandem status --json` prints. Knows nothing of protobuf (see `convert`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.decision import Decision
from tandem.types import PlacementReason, WorkerInfo, WorkerLoad

PLACEMENT_TEXTS = {
    PlacementReason.LOCAL_STATIC: "the decode worker computes every prompt, as --local-prefill-tokens says",
    PlacementReason.LOCAL_SHORT: "the prompt was no longer than --local-prefill-tokens",
    PlacementReason.LOCAL_HELD: "the decode worker held nearly all of the prompt's KV",
    PlacementReason.LOCAL_FASTER: "no pair of workers would have been sooner than the one that decoded it alone",
    PlacementReason.LOCAL_FALLBACK: "no prefill worker was ready, and --fallback is local",
    PlacementReason.REMOTE_STATIC: "split: the decode worker computes no such prompts",
    PlacementReason.REMOTE_FASTER: "split: another worker had the prompt sooner, hand-off included",
}
"""Reasons for people. Of moves there is none: a request keeps the reason that it had before."""
NOT_PLACED, NOT_PLACED_TEXT = "not_placed", "it ended before a worker was found"


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
    text: str = ""
    """The reason, for people."""


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """Number of requests that failed, or were refused, for a reason; named as `Reason`."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class HandoffPair:
    """Hand-offs from one worker to another. See cluster.proto for each field."""

    source: str
    target: str
    count: int
    num_bytes: int
    median_s: float
    transport: str
    passed_over: str


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """One of the slowest of the last requests. See cluster.proto for each field."""

    request_id: str
    trace_id: str
    outcome: str
    age_s: float
    total_s: float
    first_token_s: float
    prompt_tokens: int
    completion_tokens: int
    prefill: str
    decode: str


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
    prompt_tokens: int = 0
    cached_tokens: int = 0
    last_placements: tuple[PlacementCount, ...] = ()

    @property
    def num_last(self) -> int:
        """Number of the last requests that `last_placements` are of."""
        return sum(each.count for each in self.last_placements)

    @property
    def num_split(self) -> int:
        """Number of them whose prompt was computed on another worker than the one that decoded."""
        return sum(each.count for each in self.last_placements if each.reason.startswith("remote_"))


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
    decisions: tuple[Decision, ...] = ()
    """What the router chose by itself."""
    handoffs: tuple[HandoffPair, ...] = ()
    failures: tuple[ReasonCount, ...] = ()
    refusals: tuple[ReasonCount, ...] = ()
    slow_requests: tuple[SlowRequest, ...] = ()
