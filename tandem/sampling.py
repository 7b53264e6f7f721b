"""From what a caller asked to what a worker runs: defaults, checks, refusals by name.

Order of defaults: the request, the checkpoint's generation_config.json, then temperature 1,
max_tokens to the end of the context, a drawn seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from tandem.checkpoint import CheckpointInfo
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.limits import Limits
from tandem.types import SamplingParams, TextParams, TokenId
from tandem.v1 import inference_pb2
from tandem.validation import Validator

_NOT_BUILT = ("beam_width", "length_penalty", "prompt_logprobs")


def draw_seed() -> int:
    """64 random bits."""
    return secrets.randbits(64)


def resolve_sampling(
    message: inference_pb2.SamplingParams,
    info: CheckpointInfo,
    num_prompt_tokens: int,
    limits: Limits,
    seed_source: Callable[[], int] = draw_seed,
    *,
    max_sequence_tokens: int | None = None,
    usual_sequence_tokens: int | None = None,
) -> tuple[SamplingParams, TextParams]:
    """Resolves one request's parameters.

    `max_sequence_tokens` is what the largest worker's pool can hold of one sequence: an explicit
    max_tokens beyond it is refused. `usual_sequence_tokens` is what workers hold that take such a
    prompt now: there ends the default of max_tokens, lest only the largest could serve it.
    None = not known; then the first bounds the default, too.
    Raises InvalidRequest (a value) and UnsupportedOption (a feature), both naming the field.
    """
    _refuse_not_built(message, limits)
    validator = Validator(limits, info.vocab_size, info.context_tokens)
    validator.validate_counts(
        num_stop=len(message.stop),
        num_stop_token_ids=len(message.stop_token_ids),
        num_logit_bias=len(message.logit_bias),
    )
    text = TextParams(
        stop=tuple(message.stop),
        include_stop=message.include_stop,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        stop_token_ids=frozenset(TokenId(each) for each in message.stop_token_ids),
    )
    validator.validate_text(text)
    room = _room(info, num_prompt_tokens, usual_sequence_tokens or max_sequence_tokens)
    sampling = _fill_in(message, info, text, room, seed_source)
    validator.validate_sampling(sampling)
    validator.validate_length(num_prompt_tokens, sampling.max_tokens, max_sequence_tokens)
    return sampling, text


def _refuse_not_built(message: inference_pb2.SamplingParams, limits: Limits) -> None:
    if message.HasField("n") and not 1 <= message.n <= limits.max_n:
        raise InvalidRequest("sampling.n", f"{message.n} is not in [1, {limits.max_n}]")
    if message.n > 1:
        raise UnsupportedOption("sampling.n", "more than one choice is not supported by this version")
    for name in _NOT_BUILT:
        if message.HasField(name):
            raise UnsupportedOption(f"sampling.{name}")
    constraint = message.WhichOneof("constraint")
    if constraint is not None:
        value = getattr(message, constraint)
        size = value.ByteSize() if constraint == "choice" else len(value.encode())
        if size > limits.max_schema_bytes:
            raise InvalidRequest(
                f"sampling.{constraint}", f"{size} bytes exceed the limit of {limits.max_schema_bytes}"
            )
        raise UnsupportedOption(f"sampling.{constraint}")


def _room(info: CheckpointInfo, num_prompt_tokens: int, sequence_tokens: int | None) -> int:
    end = info.context_tokens if sequence_tokens is None else min(info.context_tokens, sequence_tokens)
    return max(1, end - num_prompt_tokens)  # at least 1, so that validate_length blames the prompt


def _fill_in(
    message: inference_pb2.SamplingParams,
    info: CheckpointInfo,
    text: TextParams,
    room: int,
    seed_source: Callable[[], int],
) -> SamplingParams:
    def asked(name: str, default: float) -> float:
        value: float = getattr(message, name) if message.HasField(name) else info.generation_defaults.get(name, default)
        return value

    eos_token_ids = frozenset() if message.ignore_eos else info.eos_token_ids
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else room,
        min_tokens=message.min_tokens,
        temperature=asked("temperature", 1.0),
        top_k=int(asked("top_k", 0)),
        top_p=asked("top_p", 1.0),
        min_p=asked("min_p", 0.0),
        repetition_penalty=asked("repetition_penalty", 1.0),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed if message.HasField("seed") else seed_source(),
        end_token_ids=eos_token_ids | text.stop_token_ids,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        logit_bias={TokenId(key): value for key, value in message.logit_bias.items()},
    )
