"""vLLM's VllmEngine: a thin face over the entrance, in token ids. Errors are raised as TandemErrors.

The protocol is described in protos/tandem/foreign/vllm_engine.proto.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc.aio

from router.entrance import Entrance, RunningRequest
from router.faces.refused_methods import refuse_methods
from router.faces.vllm.aborts import Aborts, RequestAborted
from router.faces.vllm.answer import ABORTED, Answer
from router.faces.vllm.info import ServerInfo
from router.faces.vllm.request import check_rank, read_request
from router.request import Caller
from router.status import RouterStatus
from tandem.checkpoint import CheckpointInfo
from tandem.config import RouterConfig
from tandem.foreign import smg_common_pb2, vllm_engine_pb2_grpc
from tandem.foreign import vllm_engine_pb2 as pb
from tandem.rpc.server import Service
from tandem.telemetry.trace_context import trace_of_call

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
"""As its owners named it."""
Context = grpc.aio.ServicerContext[Any, Any]
_REFUSED = {
    "Embed": "the model generates text and has no embeddings",
    "FlushCache": "there is no prefix cache to flush",
    "StartProfile": "profiles are taken with python -m bench.step_profile",
    "StopProfile": "profiles are taken with python -m bench.step_profile",
    "SubscribeKvEvents": "there is no prefix cache to report on",
}


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves one model."""

    def __init__(
        self, checkpoint: CheckpointInfo, config: RouterConfig, entrance: Entrance, status: RouterStatus
    ) -> None:
        self._entrance = entrance
        self._status = status
        self._info = ServerInfo(checkpoint, config.limits, config.max_active_requests, status)
        self._aborts = Aborts()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Chunks if asked for, then each choice whole. A slow reader only makes later chunks bigger."""
        self._info.request_came()
        with self._entrance.judging():
            completion = read_request(request)
        caller = Caller(context.time_remaining(), *trace_of_call(context.invocation_metadata()), context.peer())
        with self._aborts.listed(completion.request_id) as abortable:
            async with self._entrance.run(completion, caller) as running:
                abortable.begin(running)
                num_choices = completion.sampling.n or 1
                finals = await _read(running, context, num_choices, streamed=request.stream)
        for final in finals:
            await context.write(final)

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """As the health service says, with the reason."""
        obstacle = self._status.obstacle()
        return pb.HealthCheckResponse(healthy=obstacle is None, message=obstacle or "")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends requests of this service and releases what they hold, also where nobody reads their answers."""
        self._aborts.abort(request.request_ids)
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """What is served."""
        return self._info.model()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Who serves it."""
        return self._info.server(draining=self._entrance.draining)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """How busy it is. Raises InvalidRequest for another rank than 0."""
        check_rank("dp_rank", request.dp_rank)
        return self._info.loads()

    async def GetTokenizer(self, request: smg_common_pb2.GetTokenizerRequest, context: Context) -> None:
        """The tokenizer's files."""
        for chunk in await self._info.tokenizer():
            await context.write(chunk)


async def _read(
    running: RunningRequest, context: Context, num_choices: int, *, streamed: bool
) -> Iterable[pb.GenerateResponse]:
    """Reads all choices to their end; writes chunks until then if wanted. Returns each choice whole, by index."""
    answers = [Answer(index, running.num_prompt_tokens, streamed=streamed) for index in range(num_choices)]
    finals: dict[int, pb.GenerateResponse] = {}
    while len(finals) < num_choices:
        try:
            output = await running.delivery.get()
        except RequestAborted:
            return [finals.get(index) or answer.complete(ABORTED) for index, answer in enumerate(answers)]
        answer = answers[output.index]
        chunk = answer.add(output)
        if chunk is not None:
            await context.write(chunk)
        if output.finish_reason is not None:
            finals[output.index] = answer.complete(output.finish_reason, output.matched_stop)
    return [finals[index] for index in range(num_choices)]


def vllm_service(servicer: VllmServicer) -> Service:
    """With what of the protocol is refused by name."""

    def register(server: grpc.aio.Server) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
        refuse_methods(server, SERVICE_NAME, _REFUSED)

    return Service(SERVICE_NAME, register)
