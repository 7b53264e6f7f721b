"""A request as a face understood it. Knows no protocol.

face ──CompletionRequest, Caller──▶ entrance ──ResolvedRequest──▶ generation ──GroupSpec──▶ workers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.sampling import SamplingRequest


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, to be tokenized with the special tokens that the tokenizer adds, unless told otherwise."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, taken unchanged."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be rendered with a template of the model; `router.chat_template` says what it holds."""

    messages: Sequence[Mapping[str, Any]]
    """Each has `role` and `content`, and what else templates know of a turn; arguments of tool calls are JSON."""
    tools: Sequence[str] = ()
    """What the model may call; each a JSON object."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the template; values are JSON."""
    template_name: str = ""
    """Which template; empty = by whether there are tools."""


Prompt = TextPrompt | TokensPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What a caller wants. Nothing is judged and no default is filled in yet."""

    prompt: Prompt
    sampling: SamplingRequest = field(default_factory=SamplingRequest)
    request_id: str = ""
    """Id of the request; empty = the router draws an id."""
    model: str = ""
    """Name of the model; empty = the served model."""
    priority: int = 0
    """Larger goes first while requests wait; fits 32 bits."""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, how long it waits, and the trace that its request belongs to."""

    timeout_s: float | None
    """None = as long as the router allows."""
    traceparent: str
    """W3C trace context."""
    tracestate: str = ""
    peer: str = ""
    """Where the call came from, for logs."""
    max_priority: int | None = None
    """Highest priority of the caller's requests, by its token; None = the router's."""
