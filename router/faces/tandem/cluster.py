"""ClusterService: what this router knows of the cluster, and the order to drain a worker."""

from __future__ import annotations

from typing import Any

import grpc.aio

from router.cluster_view import ClusterView
from router.registry import Registry
from router.registry_servicer import RegistryServicer
from tandem.convert import status_to_proto
from tandem.types import WorkerId
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

SERVICE_NAME = "tandem.v1.ClusterService"

Context = grpc.aio.ServicerContext[Any, Any]


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """Serves operators."""

    def __init__(self, view: ClusterView, registry: Registry, registrations: RegistryServicer) -> None:
        self._view = view
        self._registry = registry
        self._registrations = registrations

    async def GetStatus(  # noqa: N802
        self, request: cluster_pb2.GetStatusRequest, context: Context
    ) -> cluster_pb2.GetStatusResponse:
        """Every worker by name, the admission queue, and whether a request could be served."""
        return status_to_proto(self._view.status())

    async def Drain(  # noqa: N802
        self, request: cluster_pb2.DrainRequest, context: Context
    ) -> cluster_pb2.DrainResponse:
        """Gives the worker no new work and tells it. Raises InvalidRequest for an unknown name."""
        info = self._registry.order_drain(WorkerId(request.worker_id))
        self._registrations.tell_drain(info)
        return cluster_pb2.DrainResponse()
