from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.files.checkpoint import CheckpointInfo, read_checkpoint
from router.sampling import SamplingRequest as Options
from router.sampling import num_choices, num_seqs, resolve_sampling
from tandem.errors import InvalidRequest
from tandem.limits import Limits
from tandem.types import Constraint, EarlyStopping, Language, SamplingParams, TextParams

SEED = 42
LIMITS = Limits()


def resolve(
    options: Options, info: CheckpointInfo, num_prompt_tokens: int = 10, max_sequence_tokens: int | None = None
) -> tuple[SamplingParams, TextParams]:
    return resolve_sampling(
        options, info, num_prompt_tokens, LIMITS, lambda: SEED, max_sequence_tokens=max_sequence_tokens
    )


@pytest.fixture
def info(write_checkpoint: Callable[..., Path]) -> CheckpointInfo:
    return read_checkpoint(str(write_checkpoint()))


def test_an_empty_message_gets_the_documented_defaults(info: CheckpointInfo) -> None:
    sampling, text = resolve(Options(), info)

    assert sampling == SamplingParams(max_tokens=54, temperature=1.0, seed=SEED, end_token_ids=info.eos_token_ids)
    assert text == TextParams()


def test_the_checkpoints_defaults_come_before_ours_and_after_the_callers(info: CheckpointInfo) -> None:
    info = replace(info, generation_defaults={"temperature": 0.5, "top_k": 7, "top_p": 0.5})

    sampling, _ = resolve(Options(temperature=0.0, top_p=0.25), info)

    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 7, 0.25)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (Options(stop=("a",) * (LIMITS.max_stop_strings + 1)), "sampling.stop"),
        (Options(stop_token_ids=(5,) * (LIMITS.max_stop_token_ids + 1)), "sampling.stop_token_ids"),
        (Options(logit_bias=dict.fromkeys(range(LIMITS.max_logit_bias + 1), 0)), "sampling.logit_bias"),
    ],
)
def test_too_many_entries_are_refused_even_if_they_are_the_same(
    info: CheckpointInfo, options: Options, field: str
) -> None:
    with pytest.raises(InvalidRequest, match="exceed the limit") as refused:
        resolve(options, info)

    assert refused.value.field == field


def test_zero_differs_from_unset(info: CheckpointInfo) -> None:
    info = replace(info, generation_defaults={"temperature": 0.5, "top_k": 7})

    sampling, text = resolve(Options(temperature=0.0, top_k=0, seed=0, logprobs=0, skip_special_tokens=False), info)

    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.logprobs) == (0.0, 0, 0, 0)
    assert not text.skip_special_tokens


def test_every_value_arrives(info: CheckpointInfo) -> None:
    options = Options(
        max_tokens=9, min_tokens=3, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5,
        seed=7, stop=("a", "b"), stop_token_ids=(5,), include_stop=True, ignore_eos=True, logprobs=2,
        logit_bias={3: -1.0}, n=1,
    )  # fmt: skip

    sampling, text = resolve(options, info)

    assert sampling == SamplingParams(
        max_tokens=9, min_tokens=3, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5,
        seed=7, end_token_ids=frozenset({5}), logprobs=2, logit_bias={3: -1.0},  # type: ignore[dict-item,arg-type]
    )  # fmt: skip
    assert text == TextParams(stop=("a", "b"), include_stop=True, stop_token_ids=frozenset({5}))  # type: ignore[arg-type]


def test_max_tokens_is_what_the_pool_leaves_where_that_is_less(info: CheckpointInfo) -> None:
    assert resolve(Options(), info, max_sequence_tokens=32)[0].max_tokens == 22


def test_only_the_default_of_max_tokens_ends_where_the_usual_worker_does(info: CheckpointInfo) -> None:
    def max_tokens(options: Options) -> int:
        bounds = {"max_sequence_tokens": 32, "usual_sequence_tokens": 24}
        return resolve_sampling(options, info, 10, LIMITS, **bounds)[0].max_tokens

    assert max_tokens(Options()) == 14
    assert max_tokens(Options(max_tokens=22)) == 22


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "max_sequence_tokens", "field"),
    [
        (64, None, None, "prompt"),
        (32, None, 32, "prompt"),
        (10, 55, None, "sampling.max_tokens"),
        (10, 23, 32, "sampling.max_tokens"),
        (10, 0, None, "sampling.max_tokens"),
        (10, 2**32 - 1, None, "sampling.max_tokens"),
    ],
)
def test_what_does_not_fit_is_refused(
    info: CheckpointInfo, num_prompt_tokens: int, max_tokens: int | None, max_sequence_tokens: int | None, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve(Options(max_tokens=max_tokens), info, num_prompt_tokens, max_sequence_tokens)

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (Options(regex="é" * 32_769), "sampling.regex"),
        (Options(temperature=float("nan")), "sampling.temperature"),
        (Options(stop=("",)), "sampling.stop"),
        (Options(stop_token_ids=(100,)), "sampling.stop_token_ids"),
        (Options(logit_bias={100: 1.0}), "sampling.logit_bias"),
        (Options(max_tokens=4, min_tokens=5), "sampling.min_tokens"),
        (Options(beam_width=0), "sampling.beam_width"),
        (Options(beam_width=LIMITS.max_beam_width + 1), "sampling.beam_width"),
        (Options(beam_width=4, length_penalty=10.5), "sampling.length_penalty"),
        (Options(choice=()), "sampling.choice"),
        (Options(json_schema="{}", regex="a"), "sampling.json_schema"),
        (Options(regex="a" * (LIMITS.max_schema_bytes + 1)), "sampling.regex"),
        (Options(choice=("é" * (LIMITS.max_schema_bytes // 2), "e")), "sampling.choice"),
    ],
)
def test_bad_values_are_refused_by_name(info: CheckpointInfo, options: Options, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve(options, info)

    assert refused.value.field == field


def test_each_request_draws_a_seed(info: CheckpointInfo) -> None:
    seeds = {resolve_sampling(Options(), info, 10, LIMITS)[0].seed for _ in range(8)}

    assert len(seeds) == 8


def test_one_choice_is_the_default() -> None:
    assert num_choices(Options(), LIMITS) == 1
    assert [num_choices(Options(n=n), LIMITS) for n in (1, 2, LIMITS.max_n)] == [1, 2, LIMITS.max_n]


@pytest.mark.parametrize("n", [0, -1, LIMITS.max_n + 1])
def test_a_number_of_choices_beyond_its_cap_is_refused(n: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        num_choices(Options(n=n), LIMITS)

    assert refused.value.field == "sampling.n"


@pytest.mark.parametrize("more", [{}, {"length_penalty": -0.5, "early_stopping": EarlyStopping.NEVER}])
def test_a_beam_search_is_resolved_and_a_single_beam_is_none(info: CheckpointInfo, more: dict[str, Any]) -> None:
    sampling, _ = resolve(Options(beam_width=4, **more), info)

    assert sampling.beam_width == 4
    assert sampling.length_penalty == more.get("length_penalty", 1.0)
    assert sampling.early_stopping is more.get("early_stopping", EarlyStopping.HEURISTIC)
    assert resolve(Options(beam_width=1, **more), info)[0].beam_width == 0


def test_no_more_choices_are_returned_than_there_are_beams() -> None:
    assert num_choices(Options(n=4, beam_width=4), LIMITS) == 4
    assert [num_seqs(Options(n=2, beam_width=w), LIMITS) for w in (1, 2, 5)] == [2, 2, 5]
    with pytest.raises(InvalidRequest) as refused:
        num_choices(Options(n=5, beam_width=4), LIMITS)

    assert refused.value.field == "sampling.n"


@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        (Options(json_schema="{}"), Constraint(Language.JSON_SCHEMA, ("{}",))),
        (Options(regex=""), Constraint(Language.REGEX, ("",))),
        (Options(grammar="start: A"), Constraint(Language.GRAMMAR, ("start: A",))),
        (Options(choice=("yes", "no")), Constraint(Language.CHOICE, ("yes", "no"))),
    ],
)
def test_a_constraint_is_taken_as_it_is_and_ends_with_the_text(
    info: CheckpointInfo, options: Options, constraint: Constraint
) -> None:
    sampling, _ = resolve(replace(options, ignore_eos=True), info)

    assert sampling.constraint == constraint
    assert sampling.end_token_ids == info.eos_token_ids


def test_a_model_that_cannot_end_a_text_takes_no_constraint(info: CheckpointInfo) -> None:
    with pytest.raises(InvalidRequest, match="end-of-text"):
        resolve(Options(regex="a"), replace(info, eos_token_ids=frozenset()))
