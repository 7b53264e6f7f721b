"""Caps on requests: one set for router and workers. Those that somebody turns are options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tandem.option_values import integer
from tandem.options import Section, option

_limit = partial(option, Section.LIMITS)
_MESSAGE_BYTES = 8 * 1024 * 1024
"""The least: beside a short prompt a message has room for all else that a request may bring."""
_BYTES_OF_A_TOKEN = 4
"""Bytes of a token's text: English has about four and a half, other languages fewer."""
_BYTES_OF_A_TOKEN_ID = 8
"""At most five bytes of a message, and room for what else a request brings; more than a token's text, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most of everything a request may bring."""

    max_request_id_bytes: int = 256
    """A UUID with a prefix has 40."""
    max_cache_salt_bytes: int = 256
    """A digest in hexadecimal has 128 at most."""
    max_prompt_tokens: int = _limit(
        "max-prompt-tokens",
        1_048_576,
        "tokens of a prompt; a text, or all messages of a chat together, may have four bytes for each",
        integer(1),
    )
    max_chat_messages: int = 4096
    """Their text is bounded by `max_prompt_bytes`; the number bounds what a template iterates over."""
    max_n: int = 16
    """Choices, each a sequence of its own in a batch of 64 or more."""
    max_beam_width: int = 16
    """Each beam draws as many candidates per step; published settings end at 10."""
    max_logprobs: int = _limit("max-logprobs", 20, "alternatives reported per token", integer(0, 1024))
    max_stop_strings: int = 16
    max_stop_bytes: int = 1024
    """Bytes of one stop string: so much text of a stream is held back at most."""
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    """Entries: OpenAI's API takes 300."""
    max_schema_bytes: int = _limit(
        "max-schema-bytes", 65536, "bytes of a schema, regex, grammar, or of all choices together", integer(1)
    )

    @property
    def max_message_bytes(self) -> int:
        """Returns the largest gRPC message taken: it has room for the longest prompt, as text or as token ids."""
        return max(_MESSAGE_BYTES, _BYTES_OF_A_TOKEN_ID * self.max_prompt_tokens)

    @property
    def max_prompt_bytes(self) -> int:
        """Returns the bytes of a text prompt, or of all chat messages together."""
        return _BYTES_OF_A_TOKEN * self.max_prompt_tokens
