"""Caps on requests: one set for router and workers, each an option."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.option_values import integer
from tandem.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most of everything a request may bring."""

    max_request_id_bytes: int = option("max-request-id-bytes", 256, "bytes of a request_id", integer(1, 65536))
    max_cache_salt_bytes: int = option("max-cache-salt-bytes", 256, "bytes of a cache_salt", integer(0, 65536))
    max_prompt_bytes: int = option(
        "max-prompt-bytes", 4 * 1024 * 1024, "bytes of a text prompt, or of all chat messages together", integer(1)
    )
    max_prompt_tokens: int = option("max-prompt-tokens", 1_048_576, "tokens of a prompt", integer(1))
    max_chat_messages: int = option("max-chat-messages", 4096, "messages of a chat prompt", integer(1))
    max_n: int = option("max-n", 16, "choices of a request", integer(1, 1024))
    max_beam_width: int = option("max-beam-width", 16, "beams of a beam search", integer(2, 1024))
    max_logprobs: int = option("max-logprobs", 20, "alternatives reported per token", integer(0, 1024))
    max_stop_strings: int = option("max-stop-strings", 16, "stop strings", integer(0, 1024))
    max_stop_bytes: int = option("max-stop-bytes", 1024, "bytes of one stop string", integer(1, 65536))
    max_stop_token_ids: int = option("max-stop-token-ids", 256, "stop token ids", integer(0, 65536))
    max_logit_bias: int = option("max-logit-bias", 1024, "entries of logit_bias", integer(0, 65536))
    max_schema_bytes: int = option(
        "max-schema-bytes", 65536, "bytes of a schema, regex, grammar, or of all choices together", integer(1)
    )
