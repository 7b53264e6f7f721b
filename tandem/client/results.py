"""What a server says, as plain data. Knows nothing of protobuf (see `response`)."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.types import FinishReason, TokenId, TokenLogprobs


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
    """Empty, or one per token."""
    finish_reason: FinishReason | None
    """Set on the choice's last update."""
    matched_stop: str | TokenId | None
    """The caller's stop string or stop token id that ended the choice."""
    usage: Usage | None
    """Set on the stream's last update."""
    timings: Timings | None
    """Set on the stream's last update."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished completion."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    matched_stop: str | TokenId | None


@dataclass(frozen=True, slots=True)
class Completion:
    """Every choice of one request, by index."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings

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
