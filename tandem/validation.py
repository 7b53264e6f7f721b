"""The one judge of requests, used at the router and again at every worker.

Knows the caps (`Limits`), the vocabulary and the context; every refusal is an InvalidRequest
that names the field as inference.proto does. Knows neither protobuf nor how defaults are found.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from tandem.errors import InvalidRequest
from tandem.limits import Limits
from tandem.token_ids import TokenIds
from tandem.types import GroupSpec, SamplingParams, TextParams

_BOUNDS = {
    "temperature": (0, 100),
    "top_k": (0, 2**32 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.0099999997, 100),  # float32's 0.01; less would lift logits out of what their type can hold
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, 2**64 - 1),
    "length_penalty": (-10, 10),
}
_MAX_BIAS = 100.0
_MAX_TIMEOUT_S = 7 * 86_400.0
_POOL_REMEDY = "ask for less, or start the workers with a larger --kv-memory"


@dataclass(frozen=True, slots=True)
class Validator:
    """Checks requests against the limits of a model."""

    limits: Limits
    vocab_size: int
    context_tokens: int

    def validate_request_id(self, request_id: str) -> None:
        """Checks size and characters, since the id goes into logs. Raises InvalidRequest."""
        if not request_id.isprintable() or len(request_id.encode()) > self.limits.max_request_id_bytes:
            raise InvalidRequest(
                "request_id", f"must be printable and at most {self.limits.max_request_id_bytes} bytes"
            )

    def validate_priority(self, priority: int, max_priority: int) -> None:
        """A priority is at most the caller's highest; a lower priority is free. Raises InvalidRequest."""
        if priority > max_priority:
            raise InvalidRequest("priority", f"{priority} is above {max_priority}, the highest for this caller")

    def validate_cache_salt(self, cache_salt: str) -> None:
        """Size. Raises InvalidRequest."""
        _at_most("cache_salt", len(cache_salt.encode()), self.limits.max_cache_salt_bytes, "bytes")

    def validate_prompt_bytes(self, field: str, num_bytes: int) -> None:
        """A text prompt before it is tokenized; `field` is `text` or `chat`. Raises InvalidRequest."""
        if num_bytes == 0:
            raise InvalidRequest(field, "must not be empty")
        _at_most(field, num_bytes, self.limits.max_prompt_bytes, "bytes")

    def validate_chat_messages(self, num_messages: int) -> None:
        """Number of turns. Raises InvalidRequest."""
        if num_messages == 0:
            raise InvalidRequest("chat.messages", "must not be empty")
        _at_most("chat.messages", num_messages, self.limits.max_chat_messages, "messages")

    def validate_prompt_tokens(self, token_ids: Collection[int], field: str = "token_ids.ids") -> None:
        """A prompt in tokens: not empty, in the vocabulary, leaves room to generate. Raises InvalidRequest."""
        if not token_ids:
            raise InvalidRequest("prompt", "must not be empty")
        _at_most("prompt", len(token_ids), self.limits.max_prompt_tokens, "tokens")
        if len(token_ids) >= self.context_tokens:
            raise InvalidRequest(
                "prompt",
                f"{len(token_ids)} tokens leave no room in a context of {self.context_tokens}: shorten the prompt",
            )
        self._in_vocabulary(field, token_ids)

    def validate_counts(self, *, num_stop: int, num_stop_token_ids: int, num_logit_bias: int) -> None:
        """Entries as given, before there is work for each and equal ones become one. Raises InvalidRequest."""
        _at_most("sampling.stop", num_stop, self.limits.max_stop_strings, "strings")
        _at_most("sampling.stop_token_ids", num_stop_token_ids, self.limits.max_stop_token_ids, "ids")
        _at_most("sampling.logit_bias", num_logit_bias, self.limits.max_logit_bias, "entries")

    def validate_text(self, text: TextParams) -> None:
        """Each stop string and stop id. Raises InvalidRequest."""
        for stop in text.stop:
            if not stop:
                raise InvalidRequest("sampling.stop", "must not hold an empty string")
            _at_most("sampling.stop", len(stop.encode()), self.limits.max_stop_bytes, "bytes")
        self._in_vocabulary("sampling.stop_token_ids", text.stop_token_ids)

    def validate_sampling(self, sampling: SamplingParams) -> None:
        """Each value alone, and min_tokens against max_tokens. Raises InvalidRequest.

        `validate_length` bounds max_tokens from above: a refusal then names the prompt's length.
        """
        if sampling.max_tokens < 1:
            raise InvalidRequest("sampling.max_tokens", f"must be at least 1 (got {sampling.max_tokens})")
        _within("sampling.min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
        for name, (low, high) in _BOUNDS.items():
            _within(f"sampling.{name}", getattr(sampling, name), low, high)
        if not 0 < sampling.top_p <= 1:
            raise InvalidRequest("sampling.top_p", f"{sampling.top_p:g} is not in (0, 1]")
        for name, num_logprobs in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            _within(f"sampling.{name}", num_logprobs or 0, 0, self.limits.max_logprobs)
        if sampling.beam_width:
            _within("sampling.beam_width", sampling.beam_width, 2, self.limits.max_beam_width)
        _at_most("sampling.logit_bias", len(sampling.logit_bias), self.limits.max_logit_bias, "entries")
        self._in_vocabulary("sampling.logit_bias", sampling.logit_bias)
        for bias in sampling.logit_bias.values():
            _within("sampling.logit_bias", bias, -_MAX_BIAS, _MAX_BIAS)
        if (constraint := sampling.constraint) is not None:
            num_bytes = sum(len(text.encode()) for text in constraint.texts)
            _at_most(f"sampling.{constraint.language}", num_bytes, self.limits.max_schema_bytes, "bytes")

    def validate_length(self, num_prompt_tokens: int, max_tokens: int, max_sequence_tokens: int | None = None) -> None:
        """Prompt and completion together against the context and a worker's pool. Raises InvalidRequest."""
        bounds = [("the model's context", self.context_tokens, "shorten the prompt or lower max_tokens")]
        if max_sequence_tokens is not None:
            bounds.append(("the KV pool", max_sequence_tokens, _POOL_REMEDY))
        for name, bound, remedy in bounds:
            if num_prompt_tokens >= bound:
                raise InvalidRequest(
                    "prompt", f"{num_prompt_tokens} tokens leave no room in {name} of {bound}: {remedy}"
                )
            if num_prompt_tokens + max_tokens > bound:
                raise InvalidRequest(
                    "sampling.max_tokens",
                    f"{max_tokens} tokens after a prompt of {num_prompt_tokens} exceed {name} of {bound}, which "
                    f"leaves {bound - num_prompt_tokens}: {remedy}",
                )

    def validate_group(self, spec: GroupSpec, max_sequence_tokens: int | None = None) -> None:
        """Checks a request that a worker received. Raises InvalidRequest."""
        self.validate_request_id(spec.request_id)
        self.validate_prompt_tokens(spec.prompt_token_ids)
        self.validate_sampling(spec.sampling)
        self.validate_length(spec.num_prompt_tokens, spec.sampling.max_tokens, max_sequence_tokens)
        self._in_vocabulary("sampling.stop_token_ids", spec.sampling.end_token_ids)
        indices = [choice.index for choice in spec.choices]
        if not indices or indices != sorted(set(indices)) or indices[-1] >= self.limits.max_n:
            raise InvalidRequest("choices", f"indices must ascend within [0, {self.limits.max_n - 1}]")
        if spec.sampling.beam_width:
            _within("sampling.n", indices[-1] + 1, 1, spec.sampling.beam_width)
        for choice in spec.choices:
            if choice.output_token_ids and spec.sampling.beam_width:
                raise InvalidRequest("choices", "a beam search starts from its prompt")
            if len(choice.output_token_ids) >= spec.sampling.max_tokens:
                raise InvalidRequest("choices", f"all of {spec.sampling.max_tokens} tokens are already there")
            self._in_vocabulary("choices", choice.output_token_ids)
        if spec.timeout_s is not None:
            _within("timeout_seconds", spec.timeout_s, 0, _MAX_TIMEOUT_S)

    def validate_prefix(self, spec: GroupSpec, max_sequence_tokens: int) -> None:
        """What is computed once for all choices against a prefill worker's pool. Raises InvalidRequest."""
        num_tokens = len(spec.prefix_token_ids)
        if num_tokens > max_sequence_tokens:
            raise InvalidRequest(
                "prompt", f"{num_tokens} tokens exceed the KV pool of {max_sequence_tokens}: {_POOL_REMEDY}"
            )

    def validate_pool(self, spec: GroupSpec, block_size: int, num_blocks: int) -> None:
        """All choices together against a worker's pool. Raises InvalidRequest."""
        needed, bound = spec.max_pool_tokens(block_size), num_blocks * block_size
        if needed > bound:
            raise InvalidRequest(
                f"sampling.{spec.seqs_option}",
                f"{spec.num_seqs} sequences may need {needed} token slots, the KV pool has {bound}",
            )

    def _in_vocabulary(self, field: str, ids: Collection[int]) -> None:
        lowest, highest = (0, ids.highest) if isinstance(ids, TokenIds) else (min(ids, default=0), max(ids, default=0))
        if lowest < 0 or highest >= self.vocab_size:
            raise InvalidRequest(field, f"ids must lie in [0, {self.vocab_size})")


def _within(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(field, f"{value:g} is not in [{low:g}, {high:g}]")


def _at_most(field: str, count: int, cap: int, unit: str) -> None:
    if count > cap:
        raise InvalidRequest(field, f"{count} {unit} exceed the limit of {cap}")
