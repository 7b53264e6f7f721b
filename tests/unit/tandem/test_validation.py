from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.errors import InvalidRequest
from tandem.limits import Limits
from tandem.types import ChoiceSpec, GroupSpec, RequestId, SamplingParams, TextParams, TokenId
from tandem.validation import Validator

VOCAB_SIZE = 100
CONTEXT_TOKENS = 64
VALIDATOR = Validator(Limits(max_stop_strings=2, max_stop_bytes=4, max_logit_bias=2), VOCAB_SIZE, CONTEXT_TOKENS)


def group(num_prompt: int = 10, num_output: int = 0, **sampling: Any) -> GroupSpec:
    return GroupSpec(
        request_id=RequestId("r-1"),
        prompt_token_ids=tuple(map(TokenId, range(num_prompt))),
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        choices=(ChoiceSpec(0, tuple(map(TokenId, range(num_output)))),),
    )


def with_choices(*choices: ChoiceSpec) -> GroupSpec:
    return replace(group(), choices=choices)


def field_at_fault(spec: GroupSpec, max_sequence_tokens: int | None = None) -> str:
    with pytest.raises(InvalidRequest) as refused:
        VALIDATOR.validate_group(spec, max_sequence_tokens)
    return refused.value.field


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"top_p": 1e-6, "min_p": 1.0, "top_k": 2**32 - 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": float(np.float32(0.01))},
        {"seed": 2**64 - 1, "logprobs": 20},
        {"logit_bias": {TokenId(0): -100.0, TokenId(99): 100.0}},
        {"min_tokens": 8},
        {"max_tokens": 54},
    ],
)
def test_a_good_group_passes(values: dict[str, Any]) -> None:
    VALIDATOR.validate_group(group(**values), max_sequence_tokens=64)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_a_value_that_is_no_finite_number_is_refused(name: str, bad: float) -> None:
    assert field_at_fault(group(**{name: bad})) == f"sampling.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 55),
        ("max_tokens", 2**32 - 1),
        ("min_tokens", 9),
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 100.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("logprobs", 21),
        ("beam_width", 1),
        ("beam_width", 17),
        ("length_penalty", 10.1),
        ("length_penalty", math.nan),
        ("logit_bias", {TokenId(100): 1.0}),
        ("logit_bias", {TokenId(1): 100.5}),
        ("logit_bias", {TokenId(1): math.nan}),
        ("logit_bias", dict.fromkeys((TokenId(1), TokenId(2), TokenId(3)), 1.0)),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_name(name: str, value: object) -> None:
    assert field_at_fault(group(**{name: value})) == f"sampling.{name}"


@pytest.mark.parametrize(
    ("spec", "max_sequence_tokens", "field"),
    [
        (group(num_prompt=0), None, "prompt"),
        (group(num_prompt=64), None, "prompt"),
        (group(num_prompt=65), None, "prompt"),
        (group(num_prompt=32), 32, "prompt"),
        (group(num_prompt=30, max_tokens=3), 32, "sampling.max_tokens"),
        (replace(group(), prompt_token_ids=(TokenId(100),)), None, "token_ids.ids"),
        (replace(group(), prompt_token_ids=(TokenId(-1),)), None, "token_ids.ids"),
        (group(num_output=8), None, "choices"),
        (with_choices(), None, "choices"),
        (with_choices(ChoiceSpec(1), ChoiceSpec(0)), None, "choices"),
        (with_choices(ChoiceSpec(1), ChoiceSpec(1)), None, "choices"),
        (with_choices(ChoiceSpec(16)), None, "choices"),
        (replace(with_choices(ChoiceSpec(2)), sampling=group(beam_width=2).sampling), None, "sampling.n"),
        (group(num_output=1, beam_width=2), None, "choices"),
        (with_choices(ChoiceSpec(0), ChoiceSpec(1, (TokenId(100),))), None, "choices"),
        (replace(group(), request_id=RequestId("x" * 257)), None, "request_id"),
        (replace(group(), request_id=RequestId("a\nb")), None, "request_id"),
        (replace(group(), timeout_s=math.nan), None, "timeout_seconds"),
        (replace(group(), timeout_s=-1.0), None, "timeout_seconds"),
        (group(end_token_ids=frozenset({TokenId(100)})), None, "sampling.stop_token_ids"),
    ],
)
def test_a_bad_group_is_refused_by_field(spec: GroupSpec, max_sequence_tokens: int | None, field: str) -> None:
    assert field_at_fault(spec, max_sequence_tokens) == field


def test_a_resumed_group_passes() -> None:
    VALIDATOR.validate_group(group(num_output=7))
    VALIDATOR.validate_group(with_choices(ChoiceSpec(2), ChoiceSpec(5, (TokenId(1),)), ChoiceSpec(15)))


def test_all_choices_must_fit_into_the_pool_together() -> None:
    spec = replace(group(num_prompt=10, max_tokens=8), choices=tuple(map(ChoiceSpec, range(3))))
    needed = 2 + 3 * 3  # blocks of 4: two full ones of the prompt are shared, three are each choice's own
    VALIDATOR.validate_pool(spec, block_size=4, num_blocks=needed)
    with pytest.raises(InvalidRequest) as refused:
        VALIDATOR.validate_pool(spec, block_size=4, num_blocks=needed - 1)
    assert refused.value.field == "sampling.n"


def test_all_beams_must_fit_into_the_pool_together() -> None:
    spec = group(num_prompt=10, max_tokens=8, beam_width=3)
    VALIDATOR.validate_pool(spec, block_size=4, num_blocks=2 + 3 * 3)
    with pytest.raises(InvalidRequest) as refused:
        VALIDATOR.validate_pool(spec, block_size=4, num_blocks=2 + 3 * 3 - 1)
    assert refused.value.field == "sampling.beam_width"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (TextParams(stop=("",)), "sampling.stop"),
        (TextParams(stop=("ééé",)), "sampling.stop"),
        (TextParams(stop_token_ids=frozenset({TokenId(100)})), "sampling.stop_token_ids"),
    ],
)
def test_bad_stops_are_refused(text: TextParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        VALIDATOR.validate_text(text)

    assert refused.value.field == field


@pytest.mark.parametrize("num_bytes", [0, Limits().max_prompt_bytes + 1])
def test_an_empty_or_oversize_text_is_refused(num_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match="text"):
        VALIDATOR.validate_prompt_bytes("text", num_bytes)


@pytest.mark.parametrize("num_messages", [0, Limits().max_chat_messages + 1])
def test_an_empty_or_oversize_chat_is_refused(num_messages: int) -> None:
    with pytest.raises(InvalidRequest, match=r"chat\.messages"):
        VALIDATOR.validate_chat_messages(num_messages)


def test_a_long_cache_salt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cache_salt"):
        VALIDATOR.validate_cache_salt("s" * 257)
