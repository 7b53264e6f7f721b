"""What the router's rooms stand at, read when metrics are asked for: queue, workers, drain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from router.admission import AdmissionQueue
from router.entrance import Entrance
from router.placement import Obstacle, WorkerView
from router.registry import Registry
from tandem.config import RouterConfig
from tandem.telemetry import metric_names as names
from tandem.telemetry.metric import Labels
from tandem.telemetry.metrics import Reading


class RouterReadings:
    """Call it for the readings of now."""

    def __init__(self, config: RouterConfig, queue: AdmissionQueue, registry: Registry, entrance: Entrance) -> None:
        self._config = config
        self._queue = queue
        self._registry = registry
        self._entrance = entrance

    def __call__(self) -> Iterable[Reading]:
        """Everything that `metric_names` has of the router's state."""
        queue = self._queue
        yield Reading(names.DRAINING, self._entrance.draining)
        yield Reading(names.ROUTER_QUEUED_REQUESTS, queue.num_queued)
        yield Reading(names.ROUTER_QUEUED_TOKENS, queue.queued_tokens)
        yield Reading(names.ROUTER_ACTIVE_REQUESTS, queue.num_active)
        yield Reading(names.ROUTER_MAX_ACTIVE, self._config.max_active_requests)
        yield Reading(names.ROUTER_MAX_QUEUED, self._config.max_queued_requests)
        workers = Counter[Labels]((str(view.info.role), _state(view)) for view in self._registry.views())
        for labels in names.ROUTER_WORKERS.presets:
            yield Reading(names.ROUTER_WORKERS, workers[labels], labels)


def _state(view: WorkerView) -> str:
    """One of `names.WORKER_STATES`."""
    match view.obstacle:
        case None:
            return "ready"
        case Obstacle.STALLED:
            return "stalled"
        case Obstacle.DRAINING:
            return "draining"
        case Obstacle.NOT_CONNECTED | Obstacle.NOT_HEARD:
            return "unreachable"
