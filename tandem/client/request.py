"""What a caller says, as the request that goes on the wire. Checks nothing that the server checks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import google.protobuf.message

from tandem.convert import early_stopping_to_proto
from tandem.errors import InvalidRequest
from tandem.types import EarlyStopping
from tandem.v1 import inference_pb2


class ToolCall(TypedDict):
    """A call of a tool that the assistant asked for."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


class _Turn(TypedDict):
    role: str
    """`system`, `user`, `assistant`, `tool`, or what the model's template knows."""


class Message(_Turn, total=False):
    """A turn of a conversation."""

    content: str | Sequence[str]
    """Text, or pieces of text."""
    tool_calls: Sequence[ToolCall]
    tool_call_id: str
    """Id of the call that a message of role `tool` answers."""
    name: str
    reasoning_content: str


class ChatOptions(TypedDict, total=False):
    """What goes with a conversation."""

    tools: Sequence[Mapping[str, Any]]
    """Tools that the model may call, in the form of OpenAI's API."""
    template_variables: Mapping[str, Any]
    """Further variables of the template, such as `{"enable_thinking": False}` for Qwen3."""
    template_name: str
    """Name of the template, where the model has several."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen; what is left out is decided by the served model. See inference.proto."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    n: int
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping | str
    """When a beam search stops: "heuristic", "always" or "never"."""
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    logit_bias: Mapping[int, float]
    skip_special_tokens: bool
    json_schema: str
    regex: str
    grammar: str
    choice: str | Sequence[str]


class GenerateOptions(SamplingOptions, ChatOptions, total=False):
    """Everything that a generating call takes besides a text prompt and its deadline."""

    token_ids: Sequence[int]
    """Token ids of the prompt, taken unchanged."""
    messages: Sequence[Message]
    """The prompt as a conversation, for the model's chat template."""
    request_id: str
    """Id that answers, logs and traces repeat; the server makes an id if none is given."""
    model: str
    priority: int
    cache_salt: str


_REQUEST_FIELDS = ("request_id", "model", "priority", "cache_salt")
_LISTS_OF_TEXT = {"stop", "choice"}
_CONSTRAINTS = {"json_schema", "regex", "grammar", "choice"}
"""Fields of one `oneof`: of two given fields the message would keep the last alone."""


def generate_request(text: str | None, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The request for exactly one of `text`, `token_ids`, `messages`.

    Raises InvalidRequest if there is another number of prompts, an unknown option, or a value
    that does not fit its field's type or width.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    request = inference_pb2.GenerateRequest()
    chat: dict[str, Any] = {name: given.pop(name) for name in ChatOptions.__annotations__ if name in given}
    messages = given.pop("messages", None)
    if chat and messages is None:
        raise InvalidRequest(f"prompt.chat.{min(chat)}", "goes with messages")
    _set_prompt(request, text, given.pop("token_ids", None), None if messages is None else _chat(messages, chat))
    for name in _REQUEST_FIELDS:
        if name in given:
            _set(request, name, given.pop(name), name)
    constraints = [name for name in given if name in _CONSTRAINTS]
    if len(constraints) > 1:
        raise InvalidRequest(f"sampling.{constraints[1]}", f"cannot be combined with {constraints[0]}")
    for name, value in given.items():
        if name not in SamplingOptions.__annotations__:
            raise InvalidRequest(f"sampling.{name}", "no such option")
        _set(request.sampling, name, _fitting(name, value), f"sampling.{name}")
    return request


def _fitting(name: str, value: Any) -> Any:
    """The value in the shape of its field. One text stands for a list of it; it would be taken letter by letter."""
    if name == "early_stopping":
        try:
            return early_stopping_to_proto(value)
        except ValueError as error:
            raise InvalidRequest("sampling.early_stopping", str(error)) from error
    several = [value] if name in _LISTS_OF_TEXT and isinstance(value, str) else value
    return inference_pb2.ChoiceConstraint(choices=several) if name == "choice" else several


def tokenize_request(
    text: str | None, messages: Sequence[Message] | None, model: str, options: ChatOptions
) -> inference_pb2.TokenizeRequest:
    """Builds the request for either text or messages. Raises InvalidRequest."""
    if (text is None) == (messages is None):
        raise InvalidRequest("input", "give exactly one of text, messages")
    chat = {name: value for name, value in options.items() if value is not None}
    if chat and messages is None:
        raise InvalidRequest(f"chat.{min(chat)}", "goes with messages")
    request = inference_pb2.TokenizeRequest(model=model)
    if messages is not None:
        _set(request, "chat", _chat(messages, chat), "chat")
    else:
        _set(request, "text", text, "text")
    return request


def detokenize_request(
    token_ids: Sequence[int], skip_special_tokens: bool, model: str
) -> inference_pb2.DetokenizeRequest:
    """The request. Raises InvalidRequest if an id is negative or too wide."""
    request = inference_pb2.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
    _set(request, "token_ids", token_ids, "token_ids")
    return request


def _set_prompt(
    request: inference_pb2.GenerateRequest,
    text: str | None,
    token_ids: Sequence[int] | None,
    chat: inference_pb2.Chat | None,
) -> None:
    if sum(each is not None for each in (text, token_ids, chat)) != 1:
        raise InvalidRequest("prompt", "give exactly one of prompt, token_ids, messages")
    if text is not None:
        _set(request, "text", text, "prompt.text")
    elif token_ids is not None:
        _set(request.token_ids, "ids", token_ids, "prompt.token_ids")
        request.token_ids.SetInParent()  # an empty prompt is the server's to refuse
    elif chat is not None:
        _set(request, "chat", chat, "prompt.chat")


def _chat(messages: Sequence[Message], options: Mapping[str, Any]) -> inference_pb2.Chat:
    try:
        return inference_pb2.Chat(
            messages=[_turn(message) for message in messages],
            tools=[json.dumps(tool) for tool in options.get("tools", ())],
            template_variables={
                name: json.dumps(value) for name, value in options.get("template_variables", {}).items()
            },
            template_name=options.get("template_name", ""),
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequest("prompt.chat.messages", str(error)) from error


def _turn(message: Message) -> inference_pb2.ChatMessage:
    fields: dict[str, Any] = {**message}
    if "content" in fields and not isinstance(fields["content"], str):
        fields["parts"] = [inference_pb2.ContentPart(text=text) for text in fields.pop("content")]
    if "tool_calls" in fields:
        fields["tool_calls"] = [inference_pb2.ToolCall(**call) for call in fields["tool_calls"]]
    return inference_pb2.ChatMessage(**fields)


def _set(message: google.protobuf.message.Message, name: str, value: Any, path: str) -> None:
    """Sets one field; by MergeFrom, since that is one way for scalars, lists, maps and messages."""
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(path, str(error)) from error
