"""Sampling fields that chats, completions and vLLM's additions share, and what they mean to the entrance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from router.sampling import SamplingRequest
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.types import EarlyStopping

Uint32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
TopK = Annotated[int, msgspec.Meta(ge=-1, lt=2**32)]
COMPACT = {"whitespace_flexible": False}
"""llguidance's own words for JSON without white space, in which a model cannot lose itself."""
ANY_OBJECT = {"type": "object"}


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A named schema of `response_format`."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchema | None = None

    def constraint(self) -> dict[str, Any]:
        """Returns the field of SamplingRequest that it means. Raises InvalidRequest, UnsupportedOption."""
        match self.type:
            case "text":
                return {}
            case "json_object":
                return {"json_schema": json.dumps(ANY_OBJECT)}
            case "json_schema":
                if self.json_schema is None or self.json_schema.schema is None:
                    raise InvalidRequest("response_format.json_schema", "holds no schema")
                return {"json_schema": json.dumps(self.json_schema.schema)}
        raise UnsupportedOption("response_format.type", "takes text, json_object, json_schema")


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; exactly one language."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def constraint(self) -> dict[str, Any]:
        """Returns the fields of SamplingRequest that it means; the entrance refuses two."""
        if self.json_object and self.json is not None:
            raise InvalidRequest("structured_outputs.json", "cannot be combined with json_object")
        schema: Any = ANY_OBJECT if self.json_object else self.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                raise InvalidRequest("structured_outputs.json", "is no JSON") from None
        if self.disable_any_whitespace and isinstance(schema, dict):
            schema = {**schema, "x-guidance": COMPACT}
        return {
            "json_schema": None if schema is None else json.dumps(schema),
            "regex": self.regex,
            "choice": None if self.choice is None else tuple(self.choice),
            "grammar": self.grammar,
        }


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Padding against observers of sizes; there is none."""


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of completion. `None` = not set."""

    model: str = ""
    max_tokens: Uint32 | None = None
    n: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's additions
    top_k: TopK | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Uint32 | None = None
    stop_token_ids: list[Uint32] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Uint32 | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    # without effect on an answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def num_choices(self) -> int:
        """Returns how many choices a prompt has; the entrance judges the number."""
        return 1 if self.n is None else self.n

    def sampling(self, **others: Any) -> SamplingRequest:
        """Returns the sampling, with `others` of SamplingRequest's fields. Raises InvalidRequest."""
        if self.store:
            raise UnsupportedOption("store", "answers are not kept")
        if self.spaces_between_special_tokens is False:
            raise UnsupportedOption("spaces_between_special_tokens", "tokens are decoded as the tokenizer says")
        given: dict[str, Any] = {
            **{name: getattr(self, name) for name in _ALIKE},
            "include_stop": self.include_stop_str_in_output,
            "n": self.num_choices,
            "seed": seed_of(self.seed),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": _logit_bias(self.logit_bias or {}),
            "top_k": None if self.top_k is None else max(0, self.top_k),
            **self._constraint(),
        }
        if self.use_beam_search:
            given |= {"beam_width": self.num_choices, "length_penalty": self.length_penalty, **self._early_stopping()}
        return SamplingRequest(**given | others)

    def _constraint(self) -> dict[str, Any]:
        fields = [self.structured_outputs, self.response_format]
        given = [each.constraint() for each in fields if each is not None]
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if any(each is not None for each in guided):
            old = dict(zip(("json", "regex", "choice", "grammar"), guided, strict=True))
            given.append(StructuredOutputs(**old).constraint())  # type: ignore[arg-type]  # each as its own field
        found: dict[str, Any] = {}
        for constraint in given:
            for name, value in constraint.items():
                if value is not None and name in found:
                    raise InvalidRequest("structured_outputs", f"gives {name} a second time")
                if value is not None:
                    found[name] = value
        return found

    def _early_stopping(self) -> dict[str, Any]:
        words = {True: EarlyStopping.ALWAYS, False: EarlyStopping.HEURISTIC, "never": EarlyStopping.NEVER}
        if self.early_stopping is None:
            return {}
        if self.early_stopping not in words:
            raise InvalidRequest("early_stopping", "takes true, false, never")
        return {"early_stopping": words[self.early_stopping]}


_ALIKE = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "ignore_eos", "prompt_logprobs", "skip_special_tokens"),
)
"""Fields that the entrance has under the same names."""


def seed_of(given: int | None) -> int | None:
    """Returns a seed of any sign and size as the entrance takes it."""
    return None if given is None else given & (2**64 - 1)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        bias = {int(key): value for key, value in given.items()}
    except ValueError:
        raise InvalidRequest("logit_bias", "keys must be token ids") from None
    if any(key < 0 for key in bias):
        raise InvalidRequest("logit_bias", "ids must not be negative")
    return bias
