"""KServe v2 / Triton's GRPCInferenceService: a thin face over the entrance. Errors are raised as TandemErrors.

The protocol is described in protos/tandem/foreign/kserve.proto, what tensors mean in docs/clients.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from models.files.checkpoint import CheckpointInfo
from router.entrance import Entrance
from router.faces.kserve.model import VERSION, configuration, metadata
from router.faces.kserve.request import InferRequest, check_version, read_request
from router.faces.kserve.texts import Texts, TextUpdate, mark_final, response
from router.faces.refused_methods import partial_service
from router.request import Caller
from router.status import RouterStatus
from shell.clock import Clock
from shell.rpc.authentication import caller_identity
from shell.rpc.handlers import write_whole
from shell.rpc.server import Service
from shell.rpc.status import bug_logged
from shell.telemetry.logging import get_logger
from shell.telemetry.trace_context import trace_of_call
from tandem import __version__
from tandem.errors import InvalidRequest, Reason, TandemError, Unavailable
from tandem.foreign import kserve_pb2 as pb
from tandem.foreign import kserve_pb2_grpc
from tandem.limits import Limits

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE_NAME = "inference.GRPCInferenceService"
"""Name of the service in its protocol."""
_EXTENSIONS = ("model_configuration", "parameters", "schedule_policy", "statistics")
_PROBES = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata")
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
MAX_REQUESTS = 1024
MAX_BYTES = 16 * 1024 * 1024
"""Most bytes of the requests that a stream has under way."""

_log = get_logger(__name__)


class KserveServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves a model to KServe clients."""

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
        caller = _caller(context, infer)
        tasks = [asyncio.create_task(self._whole(infer, index, caller)) for index in range(len(infer.completions))]
        try:
            return response(self._model, infer, await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """See `InferStream`."""
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


def _caller(context: Context, request: InferRequest) -> Caller:
    """Returns the caller. The request's own timeout shortens the call's deadline."""
    given = [each for each in (context.time_remaining(), request.timeout_s) if each is not None]
    trace = trace_of_call(context.invocation_metadata())
    return Caller(min(given, default=None), *trace, context.peer(), caller_identity().max_priority)


@dataclass(frozen=True, slots=True)
class _Failure:
    """All that is kept of a request that failed until its answer is written."""

    request_id: str
    message: str


class StreamRoom:
    """How much one stream may have under way; what finds no room stays unread: the client's flow control holds it back.

    Whoever enters, leaves with the same number of bytes.
    """

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_bytes = 0
        self._left = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Returns once there is room. A request alone has it, however large it is."""
        while self._num_requests >= MAX_REQUESTS or (self._num_requests and self._num_bytes + num_bytes > MAX_BYTES):
            await self._next_leave()
        self._num_requests += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        """Gives back the room of an answered request."""
        self._num_requests -= 1
        self._num_bytes -= num_bytes
        self._left.set()

    async def empty(self) -> None:
        """Returns once nothing is under way."""
        while self._num_requests:
            await self._next_leave()

    async def _next_leave(self) -> None:
        self._left.clear()
        await self._left.wait()


class InferStream:
    """A ModelStreamInfer call: any number of requests at once, answered as they come. `run` serves the call once.

    reading ──request──▶ a task of its own ──▶ responses under its id, or one error; the stream lives on
       │
       ├─ the client is done sending ─▶ the call ends with its last answer
       ├─ the call is cancelled ──────▶ every task is, and releases what it holds
       └─ the router drains ──────────▶ UNAVAILABLE once nothing runs on it: a stream left open holds up no drain
    """

    def __init__(
        self, model: str, entrance: Entrance, texts: Texts, context: Context, max_request_id_bytes: int
    ) -> None:
        self._model = model
        self._entrance = entrance
        self._texts = texts
        self._context = context
        self._max_request_id_bytes = max_request_id_bytes
        self._room = StreamRoom()
        self._writing = asyncio.Lock()
        self._all_read = False
        """Whether the client is done sending."""

    async def run(self, requests: AsyncIterator[pb.ModelInferRequest]) -> None:
        """Returns when all is answered. Raises Unavailable when the router drains, CancelledError with the call."""
        try:
            async with asyncio.TaskGroup() as group:
                drain = group.create_task(self._end_on_drain(), name="stream drain")
                async for message in requests:
                    num_bytes = message.ByteSize()
                    await self._room.enter(num_bytes)
                    group.create_task(self._answer(self._read(message), num_bytes), name="stream request")
                self._all_read = True
                await self._room.empty()
                drain.cancel()
        except BaseExceptionGroup as errors:
            # The first to fail is the reason; the others were cancelled with it, or failed the same way.
            raise errors.exceptions[0] from None

    async def _end_on_drain(self) -> None:
        await self._entrance.wait_for_drain()
        await self._room.empty()
        if self._all_read:
            return  # the stream ends well by itself
        raise Unavailable("the router is draining", Reason.DRAINING)

    def _read(self, message: pb.ModelInferRequest) -> InferRequest | _Failure:
        """Before its task begins, and without awaiting: no frame then holds the message while an answer waits."""
        try:
            with self._entrance.judging():
                request = read_request(message)
                if len(request.completions) != 1:
                    raise InvalidRequest("inputs.text_input", "must hold one text on a stream; ModelInfer takes more")
                return request
        except Exception as error:  # noqa: BLE001  (one request's bug must not end the others)
            return self._failure(message.id, error)

    async def _answer(self, request: InferRequest | _Failure, num_bytes: int) -> None:
        try:
            failure = request if isinstance(request, _Failure) else await self._generate(request)
            if failure is not None:
                about = pb.ModelInferResponse(id=failure.request_id)
                await self._write(error_message=failure.message, infer_response=mark_final(about, True))
        finally:
            self._room.leave(num_bytes)

    async def _generate(self, request: InferRequest) -> _Failure | None:
        """Answers a request; returns None if the request ended well."""
        try:
            async with aclosing(self._texts.updates(request, 0, _caller(self._context, request))) as updates:
                async for update in updates:
                    last = update.finish_reason is not None
                    final = last and not request.empty_final_response
                    await self._write(infer_response=mark_final(response(self._model, request, [update]), final))
                    if last and request.empty_final_response:
                        await self._write(infer_response=mark_final(response(self._model, request, []), True))
        except grpc.aio.BaseError:  # the peer is gone: so is the stream
            raise
        except Exception as error:  # noqa: BLE001  (the task's root)
            return self._failure(request.id, error)
        return None

    def _failure(self, request_id: str, error: Exception) -> _Failure:
        """Builds the failure of a request while `error` is handled."""
        if not isinstance(error, TandemError):
            error = bug_logged(_log, "a request on a stream failed by a bug", error)
        # One that is too long was refused for it, but is still repeated.
        request_id = request_id.encode()[: self._max_request_id_bytes].decode(errors="ignore")
        # tritonclient gives its caller nothing but the message; Triton begins its own in the same way.
        return _Failure(request_id, f"[request id: {request_id or '<id_unknown>'}] {error.message}")

    async def _write(self, *, infer_response: pb.ModelInferResponse, error_message: str = "") -> None:
        async with self._writing:  # the call takes one write at a time
            message = pb.ModelStreamInferResponse(error_message=error_message, infer_response=infer_response)
            await write_whole(self._context, message)


def kserve_service(servicer: KserveServicer) -> Service:
    """With what of the protocol is refused by name."""
    return partial_service(
        SERVICE_NAME, partial(kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, servicer), _REFUSED, _PROBES
    )
