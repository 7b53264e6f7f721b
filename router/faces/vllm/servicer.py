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
from router.faces.vllm.tokenizer import TokenizerArchive
from router.health import Health
from router.request import Caller
from tandem.foreign import smg_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
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

    def __init__(self, entrance: Entrance, health: Health, info: ServerInfo, tokenizer: TokenizerArchive) -> None:
        self._entrance = entrance
        self._health = health
        self._info = info
        self._tokenizer = tokenizer
        self._aborts = Aborts()

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
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

    async def HealthCheck(  # noqa: N802
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """As the health service says, with the reason."""
        obstacle = self._health.obstacle()
        return vllm_engine_pb2.HealthCheckResponse(healthy=obstacle is None, message=obstacle or "")

    async def Abort(  # noqa: N802
        self, request: vllm_engine_pb2.AbortRequest, context: Context
    ) -> vllm_engine_pb2.AbortResponse:
        """Ends requests of this service and releases what they hold, also where nobody reads their answers."""
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
        return self._info.server(draining=self._entrance.draining)

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


async def _read(
    running: RunningRequest, context: Context, num_choices: int, *, streamed: bool
) -> Iterable[vllm_engine_pb2.GenerateResponse]:
    """Reads all choices to their end; writes chunks until then if wanted. Returns each choice whole, by index."""
    answers = [Answer(index, running.num_prompt_tokens, streamed=streamed) for index in range(num_choices)]
    finals: dict[int, vllm_engine_pb2.GenerateResponse] = {}
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
