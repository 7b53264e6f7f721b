"""What this router tells of itself and its cluster: health, GetStatus, the admin port, metrics read when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from router.admission import Admission
from router.entrance import Entrance
from router.metrics import RouterMetrics
from router.placement import Obstacle, WorkerView
from router.serving_set import SetId
from router.tuning import ACTIVE_PER_SEAT, FEWEST_ACTIVE
from router.workers import Workers
from shell.admin.content import ScrapeTarget
from shell.clock import Clock
from shell.config import RouterConfig
from shell.rpc.open_files import OpenFiles
from shell.rpc.server import RpcServer
from shell.telemetry import metric_names as names
from shell.telemetry.metric import Labels
from shell.telemetry.metrics import Counter as Counts
from shell.telemetry.metrics import Reading
from tandem import __version__
from tandem.cluster_status import ClusterStatus, ReasonCount, WorkerStatus
from tandem.decision import Decision, decision
from tandem.types import PoolCounts, WorkerLoad

_UNKNOWN_LOAD = WorkerLoad(0, 0, 0, 0, PoolCounts(0, 0, 0, 0, 0, 0, 0, 0), 0, draining=False)
"""Load of a worker that registered and has sent no heartbeat yet."""
_STATES = {
    Obstacle.STALLED: "stalled",
    Obstacle.DRAINING: "draining",
    Obstacle.NOT_CONNECTED: "unreachable",
    Obstacle.NOT_HEARD: "unreachable",
}
"""State by obstacle, a value of `names.WORKER_STATES`."""


class RouterStatus:
    """Reads the router's rooms; owns nothing but the time of its start."""

    def __init__(
        self,
        config: RouterConfig,
        model: str,
        workers: Workers,
        admission: Admission,
        entrance: Entrance,
        counts: RouterMetrics,
        clock: Clock,
    ) -> None:
        self.admin_address = ""
        """Known only once the admin port is open."""
        self._config = config
        self._model = model
        self._workers = workers
        self._admission = admission
        self._queue = admission.queue
        self._entrance = entrance
        self._counts = counts
        self._clock = clock
        self._began_s = clock.now_s()

    @property
    def max_active_requests(self) -> int:
        """Requests that may be under way: as many as were asked for, or by the seats of the workers that serve."""
        return self._queue.max_active

    def _limit(self) -> int:
        if self._config.max_active_requests:
            return self._config.max_active_requests
        current = self._workers.serving.current
        seats = 0 if current is None else self._workers.seats.get(current, 0)
        return max(FEWEST_ACTIVE, ACTIVE_PER_SEAT * seats) if seats else self.max_active_requests

    def obstacle(self) -> str | None:
        """What keeps this router from serving, for people; None = nothing."""
        return "the router is draining" if self._entrance.draining else self._workers.readiness()

    async def announce(self, server: RpcServer) -> None:
        """Ticks the workers' leases and tells the health service of changes at once, until cancelled.

        In the same turns ends requests whose answers nobody reads, and looks at what descriptors are left.
        """
        open_files = OpenFiles(self._clock)
        while True:
            self._workers.tick()
            self._admission.resize(self._limit())
            self._entrance.end_unread()
            open_files.look()
            server.set_serving(self.obstacle() is None)
            await self._workers.wait_for_change(self._workers.tick_s)

    def cluster(self) -> ClusterStatus:
        """Workers by role and name, the admission queue, what happened lately, and what stands in the way."""
        obstacle = self.obstacle()
        views = sorted(self._workers.views(), key=lambda view: (view.info.role, view.info.worker_id))
        workers = [
            WorkerStatus(
                *(view.info, view.load or _UNKNOWN_LOAD, view.silence_s, view.connected, view.set_aside),
                set_apart=self._workers.serving.why_apart(SetId.of(view.info)),
            )
            for view in views
        ]
        return ClusterStatus(
            model=self._model,
            ready=obstacle is None,
            not_ready_reason=obstacle or "",
            queued_requests=self._queue.num_queued,
            queued_tokens=self._queue.queued_tokens,
            active_requests=self._queue.num_active,
            workers=tuple(workers),
            version=__version__,
            uptime_s=self._clock.now_s() - self._began_s,
            admin_address=self.admin_address,
            recent=replace(self._counts.recent.activity(), last_placements=self._counts.last.placements()),
            decisions=(self._active_decision(),),
            handoffs=self._counts.last.handoffs(),
            failures=_reasons(self._counts.failures),
            refusals=_reasons(self._counts.refusals),
            slow_requests=self._counts.last.slowest(),
        )

    def _active_decision(self) -> Decision:
        why = f"{ACTIVE_PER_SEAT} for each seat of the workers that serve, {FEWEST_ACTIVE} at least"
        asked = self._config.max_active_requests
        return decision("requests under way at a time", self.max_active_requests, "--max-active-requests", asked, why)

    def history(self) -> dict[str, float]:
        """Returns the figures that the admin page draws, by name."""
        status = self.cluster()
        figures = {
            "active": status.active_requests,
            "queued": status.queued_requests,
            "request-rate": status.recent.requests_per_s,
            "token-rate": status.recent.tokens_per_s,
            "failed": sum(each.count for each in (*status.failures, *status.refusals)),
        }
        for latency in status.recent.latencies if status.recent.total_requests else ():
            if latency.count:
                figures[f"{latency.name}/p50"], figures[f"{latency.name}/p99"] = latency.p50_s, latency.p99_s
        used = {f"used/{each.info.worker_id}": each.load.pool.num_used for each in status.workers}
        return figures | used

    def scrape_targets(self) -> list[ScrapeTarget]:
        """Every admin port of the cluster, this router's first."""
        workers = [view.info for view in self._workers.views()]
        return [
            ScrapeTarget(self.admin_address, "router"),
            *(ScrapeTarget(info.admin_address, info.role, info.worker_id) for info in workers if info.admin_address),
        ]

    def readings(self) -> Iterable[Reading]:
        """Everything that `metric_names` has of the router's state."""
        yield Reading(names.DRAINING, self._entrance.draining)
        yield Reading(names.ROUTER_QUEUED_REQUESTS, self._queue.num_queued)
        yield Reading(names.ROUTER_QUEUED_TOKENS, self._queue.queued_tokens)
        yield Reading(names.ROUTER_ACTIVE_REQUESTS, self._queue.num_active)
        yield Reading(names.ROUTER_MAX_ACTIVE, self.max_active_requests)
        yield Reading(names.ROUTER_MAX_QUEUED, self._config.max_queued_requests)
        views = self._workers.views()
        workers = Counter[Labels]((str(view.info.role), self._state(view)) for view in views)
        for labels in names.ROUTER_WORKERS.presets:
            yield Reading(names.ROUTER_WORKERS, workers[labels], labels)
        yield Reading(names.ROUTER_PAIRS_SET_ASIDE, self._workers.num_pairs_set_aside)

    def _state(self, view: WorkerView) -> str:
        """For the metric."""
        if view.obstacle is not None:
            return _STATES[view.obstacle]
        if SetId.of(view.info) in self._workers.serving.apart:
            return "set_apart"
        return "set_aside" if view.set_aside else "ready"


def _reasons(counts: Counts) -> tuple[ReasonCount, ...]:
    """Those that were counted, most frequent first."""
    met = [ReasonCount(reason, int(count)) for (reason,), count in counts.items() if count]
    return tuple(sorted(met, key=lambda each: -each.count))
