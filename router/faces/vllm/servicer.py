"""vLLM's VllmEngine: a thin face over the entrance, in token ids. Errors are raised as TandemErrors.

The protocol is described in protos/tandem/foreign/vllm_engine.proto.
"""

from __future__ import annotations

import grpc.aio

from router.entrance import Context, Entrance, RunningRequest
from router.faces.refused_methods import refuse_methods
from router.faces.vllm.aborts import Aborts, RequestAborted
from router.faces.vllm.answer import ABORTED, Answer
from router.faces.vllm.info import ServerInfo
from router.faces.vllm.request import check_rank, read_request
from router.faces.vllm.tokenizer import TokenizerArchive
from router.health import Health
from router.pipeline import Pipeline
from tandem.foreign import smg_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from tandem.rpc.server import Service

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
"""As its owners named it."""
_REFUSED = {
    "Embed": "the model generates text and has no embeddings",
    "FlushCache": "there is no prefix cache to flush",
    "StartProfile": "profiles are taken with python -m bench.step_profile",
    "StopProfile": "profiles are taken with python -m bench.step_profile",
    "SubscribeKvEvents": "there is no prefix cache to tell of",
}


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves one model."""

    def __init__(
        self, entrance: Entrance, pipeline: Pipeline, health: Health, info: ServerInfo, tokenizer: TokenizerArchive
    ) -> None:
        self._entrance = entrance
        self._pipeline = pipeline
        self._health = health
        self._info = info
        self._tokenizer = tokenizer
        self._aborts = Aborts()

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Chunks if asked for, then the whole. A slow reader only makes later chunks bigger."""
        self._info.request_came()
        with self._entrance.judging():
            message = read_request(request)
        with self._aborts.listed(message.request_id) as abortable:
            async with self._entrance.run(message, context) as running:
                abortable.begin(running)
                final = await _read(running, context, streamed=request.stream)
        await context.write(final)

    async def HealthCheck(  # noqa: N802
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """As the health service says, with the reason."""
        obstacle = self._health.obstacle()
        return vllm_engine_pb2.HealthCheckResponse(healthy=obstacle is None, message=obstacle or "")

    async def Abort(  # noqa: N802
        self, request: vllm_engine_pb2.AbortRequest, context: Context
    ) -> vllm_engine_pb2.AbortResponse:
        """Ends requests of this service and lets go of what they hold, also where nobody reads their answers."""
        self._aborts.abort(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def GetModelInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """What is served."""
        return self._info.model()

    async def GetServerInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Who serves it."""
        return self._info.server(draining=self._pipeline.draining)

    async def GetLoads(  # noqa: N802
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """How busy it is. Raises InvalidRequest for another rank than 0."""
        check_rank("dp_rank", request.dp_rank)
        return self._info.loads()

    async def GetTokenizer(  # noqa: N802
        self, request: smg_common_pb2.GetTokenizerRequest, context: Context
    ) -> None:
        """The tokenizer's files."""
        for chunk in await self._tokenizer.chunks():
            await context.write(chunk)


async def _read(running: RunningRequest, context: Context, *, streamed: bool) -> vllm_engine_pb2.GenerateResponse:
    """Reads the request to its end, which is returned; writes chunks until then if they are wanted."""
    answer = Answer(running.num_prompt_tokens, streamed=streamed)
    while True:
        try:
            message = await running.outbox.get()
        except RequestAborted:
            return answer.complete(ABORTED)
        chunk = answer.add(message.delta)
        if chunk is not None:
            await context.write(chunk)
        if message.summary is not None:
            return answer.complete(message.delta.finish_reason or "", message.delta.matched_stop)


def vllm_service(servicer: VllmServicer) -> Service:
    """With what of the protocol is refused by name."""

    def register(server: grpc.aio.Server) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
        refuse_methods(server, SERVICE_NAME, _REFUSED)

    return Service(SERVICE_NAME, register)
