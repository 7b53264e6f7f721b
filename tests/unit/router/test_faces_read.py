"""Tandem's and VllmEngine's requests as the entrance gets them: translation, and nothing else."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from router.choice_stream import ChoiceOutput
from router.faces.tandem.inference import _read_request as read_tandem
from router.faces.tandem.inference import _response
from router.faces.vllm.answer import Answer
from router.faces.vllm.request import read_request as read_vllm
from router.metrics import Summary
from router.request import ChatPrompt, CompletionRequest, TextPrompt, TokensPrompt
from router.sampling import SamplingRequest
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.foreign import vllm_engine_pb2 as vllm
from tandem.types import EarlyStopping, FinishReason, TokenId, TokenLogprobs
from tandem.v1 import inference_pb2 as pb

EVERY = {
    "max_tokens": 9,
    "min_tokens": 0,
    "temperature": 0.0,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "seed": 2**64 - 1,
    "n": 16,
    "beam_width": 2,
    "length_penalty": 1.0,
    "stop": ("a", "b"),
    "stop_token_ids": (0, 5),
    "include_stop": False,
    "ignore_eos": True,
    "logprobs": 0,
    "prompt_logprobs": 2,
    "logit_bias": {3: -1.0},
    "skip_special_tokens": False,
}


def test_sampling_options_are_the_fields_of_the_proto_by_the_same_names() -> None:
    assert [each.name for each in fields(SamplingRequest)] == [
        each.name for each in pb.SamplingParams.DESCRIPTOR.fields
    ]


def test_every_field_of_tandems_own_request_arrives_and_zero_differs_from_unset() -> None:
    message = pb.GenerateRequest(
        text="Hi", request_id="r", model="m", priority=-2, cache_salt="s", sampling=pb.SamplingParams(**EVERY)
    )
    expected = CompletionRequest(TextPrompt("Hi"), SamplingRequest(**EVERY), "r", "m", -2, "s")
    assert read_tandem(message) == expected
    assert read_tandem(pb.GenerateRequest(text="")) == CompletionRequest(TextPrompt(""))


@pytest.mark.parametrize(
    ("constraint", "value"), [("json_schema", "{}"), ("regex", ""), ("grammar", "x"), ("choice", ("a", "b"))]
)
def test_a_constraint_arrives_by_its_name(constraint: str, value: Any) -> None:
    given = pb.ChoiceConstraint(choices=value) if constraint == "choice" else value
    read = read_tandem(pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(**{constraint: given})))
    assert read.sampling == SamplingRequest(**{constraint: value})


def test_prompts_are_text_tokens_or_a_chat() -> None:
    tokens = read_tandem(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))).prompt
    assert isinstance(tokens, TokensPrompt)
    assert list(tokens.token_ids) == [1, 2]
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
    assert read_tandem(pb.GenerateRequest(chat=chat)).prompt == ChatPrompt([{"role": "user", "content": "Hi"}])
    with pytest.raises(InvalidRequest, match="prompt"):
        read_tandem(pb.GenerateRequest())


def test_an_output_becomes_a_response_of_its_choice_and_the_summary_goes_with_the_last() -> None:
    logprobs = (TokenLogprobs(TokenId(5), -1.0),)
    output = ChoiceOutput(3, "x", (TokenId(5),), logprobs, FinishReason.STOP, "x")
    response = _response("r", output)
    assert (response.request_id, response.index, response.text, list(response.token_ids)) == ("r", 3, "x", [5])
    assert (response.finish_reason, response.stop_text) == (pb.FINISH_REASON_STOP, "x")
    assert not response.HasField("usage")
    last = _response("r", ChoiceOutput(0, "", (), summary=Summary(7, 20, 0.0, 0.0, 0.0, 0.0, 1.5, 0, 4)))
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.timings.total_seconds) == (7, 20, 1.5)


def test_early_stopping_arrives_as_a_word_and_an_unknown_number_is_refused() -> None:
    for word, read in [
        (pb.EARLY_STOPPING_NEVER, EarlyStopping.NEVER),
        (pb.EARLY_STOPPING_UNSPECIFIED, None),
    ]:
        message = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(early_stopping=word))
        assert read_tandem(message).sampling == SamplingRequest(early_stopping=read)
    unknown = pb.SamplingParams.FromString(bytes((26 << 3 & 0x7F | 0x80, 26 >> 4, 99)))
    with pytest.raises(InvalidRequest, match="early_stopping"):
        read_tandem(pb.GenerateRequest(text="Hi", sampling=unknown))


def test_a_score_goes_with_the_end_of_a_choice() -> None:
    assert _response("r", ChoiceOutput(0, "x", (TokenId(5),), score=-1.5)).score == -1.5
    assert not _response("r", ChoiceOutput(0, "x", (TokenId(5),))).HasField("score")


def test_vllms_zero_means_unset_where_it_cannot_say_so() -> None:
    given = vllm.SamplingParams(temperature=0.0, n=4, seed=-1, skip_special_tokens=True)
    read = read_vllm(vllm.GenerateRequest(text="Hi", request_id="r", sampling_params=given))
    expected = SamplingRequest(
        temperature=0.0, n=4, seed=2**64 - 1, ignore_eos=False, include_stop=False, skip_special_tokens=True
    )
    assert read == CompletionRequest(TextPrompt("Hi"), expected, "r")


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_vllms_signed_fields_are_refused_below_zero_by_their_own_names(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_vllm(vllm.GenerateRequest(text="Hi", sampling_params=vllm.SamplingParams(**{name: -1})))
    assert caught.value.field == f"sampling_params.{name}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"grammar": "x"}, {"grammar": "x"}),
        ({"choice": vllm.ChoiceConstraint(choices=["a", "b"])}, {"choice": ("a", "b")}),
        ({"json_object": True}, {"json_schema": '{"type": "object"}'}),
        ({"json_object": False}, {}),
    ],
)
def test_vllms_constraints_become_tandems(given: dict[str, Any], expected: dict[str, Any]) -> None:
    read = read_vllm(vllm.GenerateRequest(text="Hi", sampling_params=vllm.SamplingParams(**given))).sampling

    names = ("json_schema", "regex", "grammar", "choice")
    assert {name: value for name in names if (value := getattr(read, name)) is not None} == expected


def test_what_vllm_offers_and_tandem_does_not_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOption) as caught:
        read_vllm(vllm.GenerateRequest(text="Hi", sampling_params=vllm.SamplingParams(truncate_prompt_tokens=5)))
    assert caught.value.field == "sampling_params.truncate_prompt_tokens"


PROMPT = tuple(map(TokenId, (1, 2, 3)))
DELTAS = [
    ChoiceOutput(0, "", (TokenId(token_id),), (TokenLogprobs(TokenId(token_id), -1.0, ((TokenId(7), -0.5),)),))
    for token_id in (3, 4)
]


def test_a_streamed_answer_repeats_its_tokens_but_not_their_log_probabilities() -> None:
    answer = Answer(0, PROMPT, streamed=True)

    chunks = [answer.add(delta) for delta in DELTAS]
    complete = answer.complete("length").complete

    assert [list(chunk.chunk.output_logprobs.token_ids) for chunk in chunks if chunk] == [[3], [4]]
    assert list(complete.output_ids) == [3, 4]
    assert not complete.HasField("output_logprobs")


def test_an_answer_in_one_message_has_the_log_probabilities_of_all_tokens() -> None:
    answer = Answer(0, PROMPT, streamed=False)

    assert [answer.add(delta) for delta in DELTAS] == [None, None]

    complete = answer.complete("length").complete
    assert list(complete.output_ids) == list(complete.output_logprobs.token_ids) == [3, 4]
    assert [list(top.token_ids) for top in complete.output_logprobs.top_logprobs] == [[7], [7]]


@pytest.mark.parametrize("num_top", [0, 1])
@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_the_prompt_come_once_and_the_first_has_no_value(streamed: bool, num_top: int) -> None:
    answer = Answer(0, PROMPT, streamed=streamed)
    of_prompt = tuple(TokenLogprobs(each, -2.0, ((TokenId(7), -0.5),)[:num_top]) for each in PROMPT[1:])
    outputs = [ChoiceOutput(0, "", (), prompt_logprobs=(each,)) for each in of_prompt]

    chunks = [message.chunk for each in (*outputs, *DELTAS) if (message := answer.add(each)) is not None]
    messages = [*chunks, answer.complete("length").complete]
    (scores,) = [each.input_logprobs for each in messages if each.HasField("input_logprobs")]

    assert messages[0].input_logprobs == scores
    assert list(scores.token_ids) == [1, 2, 3]
    assert [each.value if each.HasField("value") else None for each in scores.token_logprobs] == [None, -2.0, -2.0]
    assert [list(each.token_ids) for each in scores.top_logprobs] == [[], [7], [7]][: 3 * num_top]
