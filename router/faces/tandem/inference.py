"""InferenceService: protobuf in, protobuf out. What happens in between is the entrance's.

Errors are raised as TandemErrors; the server's shell turns them into statuses.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from router.choice import ChoiceDelta
from router.entrance import Entrance
from router.intake import Intake
from router.outbox import Message
from router.timeline import Summary
from router.tokenization import Tokenization
from tandem.checkpoint import CheckpointInfo
from tandem.convert import finish_reason_to_proto, logprobs_to_proto
from tandem.limits import Limits
from tandem.v1 import inference_pb2, inference_pb2_grpc

SERVICE_NAME = "tandem.v1.InferenceService"

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one model."""

    def __init__(
        self,
        checkpoint: CheckpointInfo,
        tokenization: Tokenization,
        intake: Intake,
        entrance: Entrance,
        limits: Limits,
    ) -> None:
        self._checkpoint = checkpoint
        self._tokenization = tokenization
        self._intake = intake
        self._entrance = entrance
        self._limits = limits

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Streams one completion. A slow reader only makes later messages bigger."""
        async with self._entrance.run(request, context) as running:
            while True:
                message = await running.outbox.get()
                await context.write(_response(running.request_id, message))
                if message.summary is not None:
                    return

    async def Complete(  # noqa: N802
        self, request: inference_pb2.CompleteRequest, context: Context
    ) -> inference_pb2.CompleteResponse:
        """The same, gathered."""
        async with self._entrance.run(request.generate, context) as running:
            message = await running.outbox.get_all()
        assert message.summary is not None
        return inference_pb2.CompleteResponse(
            request_id=running.request_id,
            choices=[inference_pb2.Choice(**_choice_fields(message.delta))],
            usage=_usage(message.summary),
            timings=_timings(message.summary),
        )

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Text or a conversation to tokens."""
        token_ids = await self._intake.tokenize(request)
        tokens = await self._tokenization.token_texts(token_ids)
        return inference_pb2.TokenizeResponse(token_ids=token_ids, tokens=tokens)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Tokens to text."""
        return inference_pb2.DetokenizeResponse(text=await self._intake.detokenize(request))

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        """What is served, and within which limits."""
        self._intake.check_model(request.model)
        info, limits = self._checkpoint, self._limits
        return inference_pb2.GetModelResponse(
            model=info.name,
            family=info.family,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            eos_token_ids=sorted(info.eos_token_ids),
            has_chat_template=self._tokenization.has_chat_template,
            limits=inference_pb2.RequestLimits(
                max_prompt_bytes=limits.max_prompt_bytes,
                max_prompt_tokens=limits.max_prompt_tokens,
                max_stop_strings=limits.max_stop_strings,
                max_logprobs=limits.max_logprobs,
                max_logit_bias=limits.max_logit_bias,
            ),
        )


def _response(request_id: str, message: Message) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(request_id=request_id, **_choice_fields(message.delta))
    if message.summary is not None:
        response.usage.CopyFrom(_usage(message.summary))
        response.timings.CopyFrom(_timings(message.summary))
    return response


def _choice_fields(delta: ChoiceDelta) -> dict[str, Any]:
    """The fields that GenerateResponse and Choice share."""
    fields: dict[str, Any] = {
        "index": 0,
        "text": delta.text,
        "token_ids": delta.token_ids,
        "logprobs": [logprobs_to_proto(each) for each in delta.logprobs],
        "finish_reason": finish_reason_to_proto(delta.finish_reason),
    }
    if isinstance(delta.matched_stop, str):
        fields["stop_text"] = delta.matched_stop
    elif delta.matched_stop is not None:
        fields["stop_token_id"] = delta.matched_stop
    return fields


def _usage(summary: Summary) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=summary.prompt_tokens, completion_tokens=summary.completion_tokens, cached_tokens=0
    )


def _timings(summary: Summary) -> inference_pb2.Timings:
    return inference_pb2.Timings(
        queue_seconds=summary.queue_s,
        prefill_seconds=summary.prefill_s,
        transfer_seconds=summary.transfer_s,
        first_token_seconds=summary.first_token_s,
        total_seconds=summary.total_s,
        transfer_bytes=summary.transfer_bytes,
    )
