import json
from typing import Any

import pytest

from tandem.client.request import SamplingOptions, detokenize_request, generate_request, tokenize_request
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2


def test_every_sampling_field_of_the_api_is_an_option_and_the_reverse() -> None:
    assert set(SamplingOptions.__annotations__) == set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_unset_options_stay_unset_and_zero_is_set() -> None:
    request = generate_request("p", {"temperature": 0.0})
    assert request.text == "p"
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("max_tokens")


def test_lists_maps_and_constraints_reach_their_fields() -> None:
    request = generate_request(
        None, {"token_ids": [1, 2], "stop": ["x"], "logit_bias": {4: -1.0}, "choice": ["yes", "no"], "priority": -2}
    )
    assert list(request.token_ids.ids) == [1, 2]
    assert list(request.sampling.stop) == ["x"]
    assert dict(request.sampling.logit_bias) == {4: -1.0}
    assert list(request.sampling.choice.choices) == ["yes", "no"]
    assert request.priority == -2


def test_an_empty_prompt_is_left_for_the_server_to_refuse() -> None:
    assert generate_request("", {}).WhichOneof("prompt") == "text"
    assert generate_request(None, {"token_ids": []}).WhichOneof("prompt") == "token_ids"
    assert generate_request(None, {"messages": []}).WhichOneof("prompt") == "chat"


@pytest.mark.parametrize(
    ("text", "options", "field"),
    [
        (None, {}, "prompt"),
        ("p", {"token_ids": [1]}, "prompt"),
        (None, {"token_ids": [-1]}, "prompt.token_ids"),
        (None, {"messages": [{"role": "user", "text": "x"}]}, "prompt.chat.messages"),
        ("bad \ud800 surrogate", {}, "prompt.text"),
        ("p", {"top_k": -1}, "sampling.top_k"),
        ("p", {"temperature": "hot"}, "sampling.temperature"),
        ("p", {"heat": 1}, "sampling.heat"),
        ("p", {"priority": 2**40}, "priority"),
        ("p", {"early_stopping": "soon"}, "sampling.early_stopping"),
    ],
)
def test_what_does_not_fit_the_wire_is_refused_by_name(text: str | None, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request(text, options)
    assert caught.value.field == field


def test_two_constraints_are_refused_since_the_message_has_room_for_one() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.regex: cannot be combined with json_schema"):
        generate_request("x", {"json_schema": "{}", "regex": "a"})


def test_tokenize_refuses_a_chats_options_beside_a_text() -> None:
    with pytest.raises(InvalidRequest, match=r"chat\.tools: goes with messages"):
        tokenize_request("x", None, "", {"tools": ["{}"]})


def test_tokenize_takes_exactly_one_input() -> None:
    with pytest.raises(InvalidRequest):
        tokenize_request(None, None, "", {})
    messages = tokenize_request(None, [{"role": "user", "content": "hi"}], "demo", {}).chat.messages
    assert messages[0].content == "hi"


def test_detokenize_refuses_a_negative_id() -> None:
    with pytest.raises(InvalidRequest):
        detokenize_request([-1], True, "")


def test_early_stopping_is_said_by_its_word() -> None:
    request = generate_request("x", {"beam_width": 4, "early_stopping": "never"})
    assert request.sampling.early_stopping == inference_pb2.EARLY_STOPPING_NEVER


def test_one_stop_or_choice_may_be_given_without_a_list() -> None:
    request = generate_request("x", {"stop": "END", "choice": "yes"})
    assert list(request.sampling.stop) == ["END"]
    assert list(request.sampling.choice.choices) == ["yes"]


def test_a_chat_carries_tools_calls_results_pieces_and_variables() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    request = generate_request(
        None,
        {
            "messages": [
                {"role": "user", "content": ["Weather", "in Oslo?"]},
                {"role": "assistant", "tool_calls": [{"id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'}]},
                {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
            ],
            "tools": [tool],
            "template_variables": {"enable_thinking": False},
            "template_name": "tool_use",
        },
    )
    question, call, result = request.chat.messages
    assert [part.text for part in question.parts] == ["Weather", "in Oslo?"]
    assert (call.tool_calls[0].name, call.tool_calls[0].arguments) == ("weather", '{"city":"Oslo"}')
    assert (result.tool_call_id, result.content) == ("c1", "sunny")
    assert json.loads(request.chat.tools[0]) == tool
    assert request.chat.template_variables == {"enable_thinking": "false"}
    assert request.chat.template_name == "tool_use"


def test_tools_without_a_chat_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="goes with messages"):
        generate_request("hello", {"tools": [{}]})
