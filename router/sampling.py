"""From what a caller asked to what a worker runs: defaults, checks, refusals by name.

Order of defaults: the request, the checkpoint's generation_config.json, then temperature 1,
max_tokens to the end of the context, a drawn seed. Knows no protocol: each face of the router
writes what its callers sent into `SamplingRequest`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from models.files.checkpoint import CheckpointInfo
from tandem.errors import InvalidRequest
from tandem.limits import Limits
from tandem.types import Constraint, EarlyStopping, Language, SamplingParams, TextParams, TokenId
from tandem.validation import Validator

_DRAW_SEED = partial(secrets.randbits, 63)  # what other tools, traces among them, hold as a signed integer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """What a caller asked for, as inference.proto's SamplingParams describes it; None = not set. Not judged yet."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    early_stopping: EarlyStopping | None = None


def num_choices(options: SamplingRequest, limits: Limits) -> int:
    """How many completions are asked for. Raises InvalidRequest for too many, or none."""
    count = 1 if options.n is None else options.n
    if not 1 <= count <= limits.max_n:
        raise InvalidRequest("sampling.n", f"{count} is not in [1, {limits.max_n}]")
    width = num_beams(options)
    if width and count > width:
        raise InvalidRequest("sampling.n", f"{count} choices of {width} beams")
    return count


def num_seqs(options: SamplingRequest, limits: Limits) -> int:
    """How many sequences run at once for it. Raises InvalidRequest as `num_choices` does."""
    return max(num_choices(options, limits), num_beams(options))


def num_beams(options: SamplingRequest) -> int:
    """Beams of a beam search; 0 where tokens are drawn, as a single beam means. Raises InvalidRequest for none."""
    if options.beam_width == 0:
        raise InvalidRequest("sampling.beam_width", "must be at least 1")
    return 0 if options.beam_width in (None, 1) else options.beam_width or 0


def resolve_sampling(
    options: SamplingRequest,
    info: CheckpointInfo,
    num_prompt_tokens: int,
    limits: Limits,
    seed_source: Callable[[], int] = _DRAW_SEED,
    *,
    max_sequence_tokens: int | None = None,
    usual_sequence_tokens: int | None = None,
) -> tuple[SamplingParams, TextParams]:
    """Resolves one request's parameters, the same for each of its choices (`num_choices` says how many).

    `max_sequence_tokens` is what the largest worker's pool can hold of each choice: an explicit
    max_tokens beyond it is refused. `usual_sequence_tokens` is what workers hold that take such a
    prompt now: there ends the default of max_tokens, lest only the largest could serve it.
    None = not known; then the first bounds the default, too.
    Raises InvalidRequest (a value) and UnsupportedOption (a feature), both naming the field.
    """
    validator = Validator(limits, info.vocab_size, info.context_tokens)
    validator.validate_counts(
        num_stop=len(options.stop),
        num_stop_token_ids=len(options.stop_token_ids),
        num_logit_bias=len(options.logit_bias),
    )
    text = TextParams(
        stop=options.stop,
        include_stop=bool(options.include_stop),
        skip_special_tokens=options.skip_special_tokens is not False,
        stop_token_ids=frozenset(map(TokenId, options.stop_token_ids)),
    )
    validator.validate_text(text)
    bound = usual_sequence_tokens or max_sequence_tokens
    end = info.context_tokens if bound is None else min(info.context_tokens, bound)
    room = max(1, end - num_prompt_tokens)  # at least 1, so that validate_length names the prompt
    sampling = _fill_in(options, info, text, room, seed_source)
    validator.validate_sampling(sampling)
    validator.validate_length(num_prompt_tokens, sampling.max_tokens, max_sequence_tokens)
    return sampling, text


def _constraint(options: SamplingRequest, info: CheckpointInfo) -> Constraint | None:
    """Raises InvalidRequest for more than one, for an empty one, and if the model could not end its text."""
    given = [(each, value) for each in Language if (value := getattr(options, each)) is not None]
    if not given:
        return None
    (language, value), *others = given
    field = f"sampling.{language}"
    if others:
        raise InvalidRequest(field, f"cannot be combined with {others[0][0]}")
    if not info.eos_token_ids:
        raise InvalidRequest(field, "the model has no end-of-text token to end such a text with")
    texts = (value,) if isinstance(value, str) else value
    if not texts:
        raise InvalidRequest(field, "must not be empty")
    return Constraint(language, texts)


def _fill_in(
    options: SamplingRequest,
    info: CheckpointInfo,
    text: TextParams,
    room: int,
    seed_source: Callable[[], int],
) -> SamplingParams:
    def asked(name: str, default: float) -> float:
        value: float | None = getattr(options, name)
        return info.generation_defaults.get(name, default) if value is None else value

    constraint = _constraint(options, info)
    # A text that has come to the end of its grammar can go on with nothing else, whatever else was asked for.
    eos_token_ids = frozenset() if options.ignore_eos and constraint is None else info.eos_token_ids
    return SamplingParams(
        max_tokens=room if options.max_tokens is None else options.max_tokens,
        min_tokens=options.min_tokens or 0,
        temperature=asked("temperature", 1.0),
        top_k=int(asked("top_k", 0)),
        top_p=asked("top_p", 1.0),
        min_p=asked("min_p", 0.0),
        repetition_penalty=asked("repetition_penalty", 1.0),
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        seed=seed_source() if options.seed is None else options.seed,
        end_token_ids=eos_token_ids | text.stop_token_ids,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        logit_bias={TokenId(key): value for key, value in options.logit_bias.items()},
        beam_width=num_beams(options),
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        early_stopping=options.early_stopping or EarlyStopping.HEURISTIC,
        constraint=constraint,
    )
