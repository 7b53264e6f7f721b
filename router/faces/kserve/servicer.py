"""KServe v2 / Triton's GRPCInferenceService: a thin face over the entrance. Errors are raised as TandemErrors.

The protocol is described in protos/tandem/foreign/kserve.proto, what tensors mean in docs/clients.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

from models.files.checkpoint import CheckpointInfo
from router.entrance import Entrance
from router.faces.kserve.model import VERSION, configuration, metadata
from router.faces.kserve.request import InferRequest, check_version, read_request
from router.faces.kserve.stream import Context, InferStream, caller_of
from router.faces.kserve.texts import Texts, TextUpdate, response
from router.faces.refused_methods import partial_service
from router.request import Caller
from router.status import RouterStatus
from shell.clock import Clock
from shell.rpc.server import Service
from tandem import __version__
from tandem.errors import InvalidRequest
from tandem.foreign import kserve_pb2 as pb
from tandem.foreign import kserve_pb2_grpc
from tandem.limits import Limits

SERVICE_NAME = "inference.GRPCInferenceService"
"""Name of the service in its protocol."""
_EXTENSIONS = ("model_configuration", "parameters", "schedule_policy", "statistics")
_REFUSED = {
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), "a router serves the model it was started with"),
    **dict.fromkeys(
        (
            *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
            *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
        ),
        "shared memory is not supported; send tensors in the request",
    ),
    "TraceSetting": "tracing is set by the OTEL_ environment variables",
    "LogSettings": "logging is set by --log-level and --log-format",
}


class KserveServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves one model."""

    def __init__(
        self, checkpoint: CheckpointInfo, entrance: Entrance, status: RouterStatus, clock: Clock, limits: Limits
    ) -> None:
        self._checkpoint = checkpoint
        self._model = checkpoint.name
        self._entrance = entrance
        self._status = status
        self._limits = limits
        self._texts = Texts(entrance, clock)

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """True."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """As the health service says."""
        return pb.ServerReadyResponse(ready=self._status.obstacle() is None)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """False, and no error, for a model that is not here: so Triton does it."""
        known = request.name != "" and self._checkpoint.answers_to(request.name) and request.version in {"", VERSION}
        return pb.ModelReadyResponse(ready=known and self._status.obstacle() is None)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Name, version, extensions."""
        return pb.ServerMetadataResponse(name="tandem", version=__version__, extensions=_EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Its tensors. Raises ModelNotFound."""
        self._check_model(request.name, request.version)
        return metadata(self._model)

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """Its tensors in Triton's words. Raises ModelNotFound."""
        self._check_model(request.name, request.version)
        return pb.ModelConfigResponse(config=configuration(self._model))

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """Computes all texts at once; a text that fails ends the call."""
        with self._entrance.judging():
            infer = read_request(request)
            if infer.stream:
                raise InvalidRequest("stream", "ModelInfer gives one response; call ModelStreamInfer")
        caller = caller_of(context, infer)
        tasks = [asyncio.create_task(self._whole(infer, index, caller)) for index in range(len(infer.completions))]
        try:
            return response(self._model, infer, await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """See `stream`."""
        cap = self._limits.max_request_id_bytes
        await InferStream(self._model, self._entrance, self._texts, context, cap).run(request_iterator)

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Returns the statistics of the served model. Raises ModelNotFound."""
        self._check_model(request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=[self._texts.statistics(self._model)])

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Lists the served model."""
        obstacle = self._status.obstacle()
        index = pb.RepositoryIndexResponse.ModelIndex(
            name=self._model,
            version=VERSION,
            state="READY" if obstacle is None else "UNAVAILABLE",
            reason=obstacle or "",
        )
        return pb.RepositoryIndexResponse(models=[index] if obstacle is None or not request.ready else [])

    async def _whole(self, infer: InferRequest, index: int, caller: Caller) -> TextUpdate:
        async with aclosing(self._texts.updates(infer, index, caller)) as updates:
            return await anext(updates)

    def _check_model(self, name: str, version: str) -> None:
        self._entrance.check_model(name)
        check_version(version)


def kserve_service(servicer: KserveServicer) -> Service:
    """With what of the protocol is refused by name."""
    return partial_service(
        SERVICE_NAME, partial(kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, servicer), _REFUSED
    )
