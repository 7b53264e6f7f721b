"""InferenceService: protobuf in, protobuf out. What happens in between is the entrance's.

Errors are raised as TandemErrors; the server's shell turns them into statuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio

from models.files.checkpoint import CheckpointInfo
from router.choice_stream import ChoiceOutput
from router.entrance import Entrance
from router.metrics import Summary
from router.request import Caller, ChatPrompt, CompletionRequest, Prompt, TextPrompt, TokensPrompt
from router.sampling import SamplingRequest
from router.tokenization import Tokenization
from shell.rpc.authentication import caller_identity
from shell.telemetry.trace_context import trace_of_call
from tandem.convert import early_stopping_from_proto, finish_reason_to_proto, logprobs_to_proto
from tandem.errors import InvalidRequest
from tandem.limits import Limits
from tandem.types import EarlyStopping
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

INFERENCE_SERVICE = "tandem.v1.InferenceService"

WRITERS = ("Complete", "Tokenize")
"""Methods that write their one response themselves, so that what it takes counts until it has left."""

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves a model to Tandem's own clients."""

    def __init__(
        self, checkpoint: CheckpointInfo, tokenization: Tokenization, entrance: Entrance, limits: Limits
    ) -> None:
        self._checkpoint = checkpoint
        self._tokenization = tokenization
        self._entrance = entrance
        self._limits = limits

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Streams all choices. A slow reader only makes later messages bigger."""
        with self._entrance.judging():
            completion = _read_request(request)
        async with self._entrance.run(completion, _caller(context)) as running:
            while True:
                output = await running.delivery.get()
                await context.write(_response(running.request_id, output))
                if output.summary is not None:
                    return

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> None:
        """The same, gathered. Writes its one response: the request runs until that has left."""
        with self._entrance.judging():
            completion = _read_request(request.generate)
        async with self._entrance.run(completion, _caller(context)) as running:
            await context.write(_whole(running.request_id, await running.delivery.get_all()))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> None:
        """Text or a conversation to tokens. Writes its one response: a large one counts until it has left."""
        self._entrance.check_model(request.model)
        match request.WhichOneof("input"):
            case "text":
                prompt: TextPrompt | ChatPrompt = TextPrompt(request.text)
            case "chat":
                prompt = _chat(request.chat)
            case _:
                raise InvalidRequest("input", "one of text and chat must be set")
        response = pb.TokenizeResponse()

        def take(token_ids: Sequence[int], tokens: Sequence[str]) -> None:
            response.token_ids.extend(token_ids)
            response.tokens.extend(tokens)

        token_ids = await self._entrance.tokenize(prompt)
        with self._tokenization.answering(len(token_ids)):
            await self._tokenization.describe(token_ids, take)
            del token_ids
            await context.write(response)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Tokens to text."""
        self._entrance.check_model(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._entrance.detokenize(request.token_ids, skip_special_tokens=skip)
        return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """What is served, and within which limits."""
        self._entrance.check_model(request.model)
        info, limits = self._checkpoint, self._limits
        return pb.GetModelResponse(
            model=info.name,
            family=info.family,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            eos_token_ids=sorted(info.eos_token_ids),
            has_chat_template=self._tokenization.has_chat_template,
            limits=pb.RequestLimits(
                max_prompt_bytes=limits.max_prompt_bytes,
                max_prompt_tokens=limits.max_prompt_tokens,
                max_stop_strings=limits.max_stop_strings,
                max_logprobs=limits.max_logprobs,
                max_logit_bias=limits.max_logit_bias,
                max_beam_width=limits.max_beam_width,
                max_schema_bytes=limits.max_schema_bytes,
            ),
        )


def _caller(context: Context) -> Caller:
    trace = trace_of_call(context.invocation_metadata())
    return Caller(context.time_remaining(), *trace, context.peer(), caller_identity().max_priority)


def _read_request(message: pb.GenerateRequest) -> CompletionRequest:
    """Raises InvalidRequest where there is no prompt."""
    return CompletionRequest(
        prompt=_prompt(message),
        sampling=_sampling(message.sampling),
        request_id=message.request_id,
        model=message.model,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def _prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokensPrompt(message.token_ids.ids)
        case "chat":
            return _chat(message.chat)
        case _:
            raise InvalidRequest("prompt", "one of text, token_ids and chat must be set")


def _chat(chat: pb.Chat) -> ChatPrompt:
    return ChatPrompt(
        [_turn(each) for each in chat.messages], tuple(chat.tools), dict(chat.template_variables), chat.template_name
    )


def _turn(message: pb.ChatMessage) -> dict[str, Any]:
    """As templates know it; what is not set stays out, since templates ask for that."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        turn["content"] = [{"type": "text", "text": part.text} for part in message.parts]
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if value := getattr(message, name):
            turn[name] = value
    return turn


def _sampling(message: pb.SamplingParams) -> SamplingRequest:
    """SamplingRequest has the message's fields, by the same names; those that are not set stay out."""
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = tuple(given[name])
    if "choice" in given:
        given["choice"] = tuple(message.choice.choices)
    if "early_stopping" in given:
        given["early_stopping"] = _early_stopping(message.early_stopping)
    return SamplingRequest(**given)


def _early_stopping(value: pb.EarlyStopping) -> EarlyStopping | None:
    if value not in pb.EarlyStopping.values():
        raise InvalidRequest("sampling.early_stopping", f"{value} is no such word")
    return early_stopping_from_proto(value)


def _response(request_id: str, output: ChoiceOutput) -> pb.GenerateResponse:
    if output.is_plain:  # nearly all are, one per token
        return pb.GenerateResponse(
            request_id=request_id, index=output.index, text=output.text, token_ids=output.token_ids
        )
    figures = {} if output.summary is None else _figures(output.summary)
    prompt = [logprobs_to_proto(each) for each in output.prompt_logprobs]
    return pb.GenerateResponse(request_id=request_id, prompt_logprobs=prompt, **_choice_fields(output), **figures)


def _whole(request_id: str, outputs: Sequence[ChoiceOutput]) -> pb.CompleteResponse:
    summary = outputs[-1].summary
    assert summary is not None
    choices = [pb.Choice(**_choice_fields(each)) for each in outputs]
    prompt = [logprobs_to_proto(each) for each in outputs[0].prompt_logprobs]
    return pb.CompleteResponse(request_id=request_id, choices=choices, prompt_logprobs=prompt, **_figures(summary))


def _choice_fields(output: ChoiceOutput) -> dict[str, Any]:
    """The fields that GenerateResponse and Choice share."""
    fields: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "logprobs": [logprobs_to_proto(each) for each in output.logprobs],
        "finish_reason": finish_reason_to_proto(output.finish_reason),
    }
    if isinstance(output.matched_stop, str):
        fields["stop_text"] = output.matched_stop
    elif output.matched_stop is not None:
        fields["stop_token_id"] = output.matched_stop
    if output.score is not None:
        fields["score"] = output.score
    return fields


def _figures(summary: Summary) -> dict[str, Any]:
    """The fields that a request's last GenerateResponse and CompleteResponse share."""
    return {
        "usage": pb.Usage(
            prompt_tokens=summary.prompt_tokens,
            completion_tokens=summary.completion_tokens,
            cached_tokens=summary.cached_tokens,
        ),
        "timings": pb.Timings(
            queue_seconds=summary.queue_s,
            prefill_seconds=summary.prefill_s,
            transfer_seconds=summary.transfer_s,
            first_token_seconds=summary.first_token_s,
            total_seconds=summary.total_s,
            transfer_bytes=summary.transfer_bytes,
        ),
    }
