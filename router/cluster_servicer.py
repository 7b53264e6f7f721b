"""ClusterService: what this router knows of the cluster, and the order to drain a worker."""

from __future__ import annotations

from typing import Any

import grpc.aio

from router.admission import AdmissionQueue
from router.health import Health
from router.placement import WorkerView
from router.registry import Registry
from router.registry_servicer import RegistryServicer
from tandem.convert import info_to_proto, load_to_proto
from tandem.types import WorkerId
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

SERVICE_NAME = "tandem.v1.ClusterService"

Context = grpc.aio.ServicerContext[Any, Any]


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """Serves operators."""

    def __init__(
        self, model: str, registry: Registry, registrations: RegistryServicer, queue: AdmissionQueue, health: Health
    ) -> None:
        self._model = model
        self._registry = registry
        self._registrations = registrations
        self._queue = queue
        self._health = health

    async def GetStatus(  # noqa: N802
        self, request: cluster_pb2.GetStatusRequest, context: Context
    ) -> cluster_pb2.GetStatusResponse:
        """Every worker by name, the admission queue, and whether a request could be served."""
        obstacle = self._health.obstacle()
        views = sorted(self._registry.views(), key=lambda view: (view.info.role, view.info.worker_id))
        return cluster_pb2.GetStatusResponse(
            model=self._model,
            ready=obstacle is None,
            not_ready_reason=obstacle or "",
            queued_requests=self._queue.num_queued,
            queued_tokens=self._queue.queued_tokens,
            active_requests=self._queue.num_active,
            workers=[self._worker(view) for view in views],
        )

    async def Drain(  # noqa: N802
        self, request: cluster_pb2.DrainRequest, context: Context
    ) -> cluster_pb2.DrainResponse:
        """Gives the worker no new work and tells it. Raises InvalidRequest for an unknown name."""
        info = self._registry.order_drain(WorkerId(request.worker_id))
        self._registrations.tell_drain(info)
        return cluster_pb2.DrainResponse()

    def _worker(self, view: WorkerView) -> cluster_pb2.WorkerStatus:
        return cluster_pb2.WorkerStatus(
            info=info_to_proto(view.info),
            load=None if view.load is None else load_to_proto(view.load),
            heartbeat_age_seconds=self._registry.silence_s(view.info),
            connected=self._registry.connected(view.info),
        )
