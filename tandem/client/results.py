"""What a server says, as plain data, and how it is read from the wire. The client's half of `tandem.convert`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from tandem.convert import finish_reason_from_proto, logprobs_from_proto, plain
from tandem.types import FinishReason, TokenId, TokenLogprobs
from tandem.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, as the router and its workers measured it."""

    queue_s: float
    prefill_s: float
    transfer_s: float
    first_token_s: float
    """Arrival at the router to the first token's arrival there."""
    total_s: float
    transfer_bytes: int
    """KV handed from prefill to decode worker; 0 if prefilled on the decode worker."""


@dataclass(frozen=True, slots=True)
class GenerationUpdate:
    """What was generated since the choice's last update."""

    request_id: str
    index: int
    """Which choice."""
    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """Log-probabilities, an entry per token, or empty."""
    finish_reason: FinishReason | None
    """Set on the choice's last update."""
    matched_stop: str | TokenId | None
    """The caller's stop string or stop token id that ended the choice."""
    usage: Usage | None
    """Set on the stream's last update."""
    timings: Timings | None
    """Set on the stream's last update."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, if asked for; in updates before the first token."""
    score: float | None = None
    """Set on the last update of a choice that a beam search found."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A finished completion."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    matched_stop: str | TokenId | None
    score: float | None = None
    """Score of a choice that a beam search found."""


@dataclass(frozen=True, slots=True)
class Completion:
    """All choices of a request, by index."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, if asked for."""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Ids, and the token that each stands for."""

    token_ids: tuple[TokenId, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served. `max_…` are caps on requests."""

    model: str
    family: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[TokenId]
    has_chat_template: bool
    max_prompt_bytes: int
    max_prompt_tokens: int
    max_stop_strings: int
    max_logprobs: int
    max_logit_bias: int
    max_beam_width: int = 0
    """0 = an older server, which does not say."""
    max_schema_bytes: int = 0
    """The same."""


def update(message: inference_pb2.GenerateResponse) -> GenerationUpdate:
    """A message of a Generate stream."""
    return GenerationUpdate(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        token_ids=_token_ids(message.token_ids),
        logprobs=tuple(map(logprobs_from_proto, message.logprobs)),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        matched_stop=_matched_stop(message),
        score=message.score if message.HasField("score") else None,
        usage=plain(Usage, message.usage) if message.HasField("usage") else None,
        timings=plain(Timings, message.timings) if message.HasField("timings") else None,
        prompt_logprobs=tuple(map(logprobs_from_proto, message.prompt_logprobs)),
    )


def completion(message: inference_pb2.CompleteResponse) -> Completion:
    """The answer of Complete."""
    return Completion(
        request_id=message.request_id,
        choices=tuple(_choice(choice) for choice in message.choices),
        usage=plain(Usage, message.usage),
        timings=plain(Timings, message.timings),
        prompt_logprobs=tuple(map(logprobs_from_proto, message.prompt_logprobs)),
    )


def tokenization(message: inference_pb2.TokenizeResponse) -> Tokenization:
    """The answer of Tokenize."""
    return Tokenization(_token_ids(message.token_ids), tuple(message.tokens))


def served_model(message: inference_pb2.GetModelResponse) -> ServedModel:
    """The answer of GetModel."""
    caps = {each.name: getattr(message.limits, each.name) for each in fields(ServedModel) if each.name[:4] == "max_"}
    return plain(ServedModel, message, eos_token_ids=frozenset(_token_ids(message.eos_token_ids)), **caps)


def _choice(message: inference_pb2.Choice) -> Choice:
    return plain(
        Choice,
        message,
        token_ids=_token_ids(message.token_ids),
        logprobs=tuple(map(logprobs_from_proto, message.logprobs)),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        matched_stop=_matched_stop(message),
        score=message.score if message.HasField("score") else None,
    )


def _matched_stop(message: inference_pb2.GenerateResponse | inference_pb2.Choice) -> str | TokenId | None:
    if message.HasField("stop_text"):
        return message.stop_text
    if message.HasField("stop_token_id"):
        return TokenId(message.stop_token_id)
    return None


def _token_ids(ids: Iterable[int]) -> tuple[TokenId, ...]:
    return tuple(map(TokenId, ids))
