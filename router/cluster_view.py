"""What this router knows of its cluster, put together when asked: for GetStatus and for the admin port."""

from __future__ import annotations

from router.admission import AdmissionQueue
from router.health import Health
from router.placement import WorkerView
from router.registry import Registry
from tandem import __version__
from tandem.admin.content import ScrapeTarget
from tandem.clock import Clock
from tandem.cluster_status import ClusterStatus, WorkerStatus
from tandem.telemetry.recent_latencies import RecentLatencies
from tandem.types import PoolCounts, WorkerLoad

_UNKNOWN_LOAD = WorkerLoad(0, 0, 0, 0, PoolCounts(0, 0, 0, 0, 0, 0, 0, 0), 0, draining=False)
"""Of a worker that registered and has sent no heartbeat yet."""


class ClusterView:
    """Reads the router's rooms; owns nothing but the time of its start."""

    def __init__(
        self,
        model: str,
        registry: Registry,
        queue: AdmissionQueue,
        health: Health,
        recent: RecentLatencies,
        clock: Clock,
    ) -> None:
        self._model = model
        self._registry = registry
        self._queue = queue
        self._health = health
        self._recent = recent
        self._clock = clock
        self._began_s = clock.now_s()
        self._admin_address = ""

    @property
    def uptime_s(self) -> float:
        """Time since the router was built."""
        return self._clock.now_s() - self._began_s

    def set_admin_address(self, address: str) -> None:
        """The admin port is known only once it is open."""
        self._admin_address = address

    def status(self) -> ClusterStatus:
        """Workers by role and name, the admission queue, what happened lately, and what stands in the way."""
        obstacle = self._health.obstacle()
        views = sorted(self._registry.views(), key=lambda view: (view.info.role, view.info.worker_id))
        return ClusterStatus(
            model=self._model,
            ready=obstacle is None,
            not_ready_reason=obstacle or "",
            queued_requests=self._queue.num_queued,
            queued_tokens=self._queue.queued_tokens,
            active_requests=self._queue.num_active,
            workers=tuple(self._worker(view) for view in views),
            version=__version__,
            uptime_s=self.uptime_s,
            admin_address=self._admin_address,
            recent=self._recent.activity(),
        )

    def scrape_targets(self) -> list[ScrapeTarget]:
        """Every admin port of the cluster, this router's first."""
        workers = [view.info for view in self._registry.views()]
        return [
            ScrapeTarget(self._admin_address, "router"),
            *(ScrapeTarget(info.admin_address, info.role, info.worker_id) for info in workers if info.admin_address),
        ]

    def _worker(self, view: WorkerView) -> WorkerStatus:
        return WorkerStatus(
            info=view.info,
            load=view.load or _UNKNOWN_LOAD,
            heartbeat_age_s=self._registry.silence_s(view.info),
            connected=self._registry.connected(view.info),
        )
