from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.checkpoint import CheckpointInfo
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.limits import Limits
from tandem.sampling import resolve_sampling
from tandem.types import SamplingParams, TextParams
from tandem.v1.inference_pb2 import ChoiceConstraint
from tandem.v1.inference_pb2 import SamplingParams as Message

SEED = 42
LIMITS = Limits()


def resolve(
    message: Message, info: CheckpointInfo, num_prompt_tokens: int = 10, max_sequence_tokens: int | None = None
) -> tuple[SamplingParams, TextParams]:
    return resolve_sampling(
        message, info, num_prompt_tokens, LIMITS, lambda: SEED, max_sequence_tokens=max_sequence_tokens
    )


def test_an_empty_message_gets_the_documented_defaults(info: CheckpointInfo) -> None:
    sampling, text = resolve(Message(), info)

    assert sampling == SamplingParams(max_tokens=54, temperature=1.0, seed=SEED, end_token_ids=info.eos_token_ids)
    assert text == TextParams()


def test_the_checkpoints_defaults_come_before_ours_and_after_the_callers(info: CheckpointInfo) -> None:
    info = replace(info, generation_defaults={"temperature": 0.5, "top_k": 7, "top_p": 0.5})

    sampling, _ = resolve(Message(temperature=0.0, top_p=0.25), info)

    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 7, 0.25)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message(stop=["a"] * (LIMITS.max_stop_strings + 1)), "sampling.stop"),
        (Message(stop_token_ids=[5] * (LIMITS.max_stop_token_ids + 1)), "sampling.stop_token_ids"),
        (Message(logit_bias=dict.fromkeys(range(LIMITS.max_logit_bias + 1), 0)), "sampling.logit_bias"),
    ],
)
def test_too_many_entries_are_refused_even_if_they_are_the_same(
    info: CheckpointInfo, message: Message, field: str
) -> None:
    with pytest.raises(InvalidRequest, match="exceed the limit") as refused:
        resolve(message, info)

    assert refused.value.field == field


def test_zero_differs_from_unset(info: CheckpointInfo) -> None:
    info = replace(info, generation_defaults={"temperature": 0.5, "top_k": 7})

    sampling, text = resolve(Message(temperature=0.0, top_k=0, seed=0, logprobs=0, skip_special_tokens=False), info)

    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.logprobs) == (0.0, 0, 0, 0)
    assert not text.skip_special_tokens


def test_every_value_arrives(info: CheckpointInfo) -> None:
    message = Message(
        max_tokens=9, min_tokens=3, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5,
        seed=7, stop=["a", "b"], stop_token_ids=[5], include_stop=True, ignore_eos=True, logprobs=2,
        logit_bias={3: -1.0}, n=1,
    )  # fmt: skip

    sampling, text = resolve(message, info)

    assert sampling == SamplingParams(
        max_tokens=9, min_tokens=3, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5,
        seed=7, end_token_ids=frozenset({5}), logprobs=2, logit_bias={3: -1.0},  # type: ignore[dict-item,arg-type]
    )  # fmt: skip
    assert text == TextParams(stop=("a", "b"), include_stop=True, stop_token_ids=frozenset({5}))  # type: ignore[arg-type]


def test_max_tokens_is_what_the_pool_leaves_where_that_is_less(info: CheckpointInfo) -> None:
    assert resolve(Message(), info, max_sequence_tokens=32)[0].max_tokens == 22


def test_only_the_default_of_max_tokens_ends_where_the_usual_worker_does(info: CheckpointInfo) -> None:
    def max_tokens(message: Message) -> int:
        bounds = {"max_sequence_tokens": 32, "usual_sequence_tokens": 24}
        return resolve_sampling(message, info, 10, LIMITS, **bounds)[0].max_tokens

    assert max_tokens(Message()) == 14
    assert max_tokens(Message(max_tokens=22)) == 22


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
        resolve(Message(max_tokens=max_tokens), info, num_prompt_tokens, max_sequence_tokens)

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message(n=2), "sampling.n"),
        (Message(n=16), "sampling.n"),
        (Message(beam_width=0), "sampling.beam_width"),
        (Message(beam_width=4), "sampling.beam_width"),
        (Message(length_penalty=1.0), "sampling.length_penalty"),
        (Message(prompt_logprobs=0), "sampling.prompt_logprobs"),
        (Message(json_schema="{}"), "sampling.json_schema"),
        (Message(regex=""), "sampling.regex"),
        (Message(grammar="start: A"), "sampling.grammar"),
        (Message(choice=ChoiceConstraint(choices=["yes"])), "sampling.choice"),
    ],
)
def test_options_without_their_feature_are_refused_by_name(info: CheckpointInfo, message: Message, field: str) -> None:
    with pytest.raises(UnsupportedOption) as refused:
        resolve(message, info)

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message(n=0), "sampling.n"),
        (Message(n=17), "sampling.n"),
        (Message(regex="é" * 32_769), "sampling.regex"),
        (Message(temperature=float("nan")), "sampling.temperature"),
        (Message(stop=[""]), "sampling.stop"),
        (Message(stop_token_ids=[100]), "sampling.stop_token_ids"),
        (Message(logit_bias={100: 1.0}), "sampling.logit_bias"),
        (Message(max_tokens=4, min_tokens=5), "sampling.min_tokens"),
    ],
)
def test_bad_values_are_refused_by_name(info: CheckpointInfo, message: Message, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve(message, info)

    assert refused.value.field == field


def test_seeds_are_drawn_anew(info: CheckpointInfo) -> None:
    seeds = {resolve_sampling(Message(), info, 10, LIMITS)[0].seed for _ in range(8)}

    assert len(seeds) == 8
