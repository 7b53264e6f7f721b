from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.faces.parsers import source
from router.faces.parsers.forced import ForcedCall, ForcedCalls
from router.faces.parsers.parts import AnswerParser, CallArguments, CallBegan, Part, Reasoning, Text
from tests.unit.router.recorded_answers import RECORDINGS, TEMPLATES, TOOLS, Recording, call, format_of, joined, parse

FORMATS = sorted(TEMPLATES)
FORCED = '[{"name":"weather","parameters":{"city":"Oslo"}},{"name":"now","parameters":{}}]'
FRAGMENTS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<function=", ">", "</function>"),
    *("<parameter=", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>", ";"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[", "]", "{", "}", ",", ":", '"', "\\", "\n", " ", " " * 9, "é", "😀"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("```json", "```", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "assistant"),
    *("analysis", "commentary", "final", "to=functions.", "<|constrain|>", '{"name": "f", "arguments": {', '"name"'),
    *('"parameters"', "<", "<tool_", "<｜"),
]
PLACES = st.lists(st.integers(0, 10_000), max_size=9)


def texts(name: str) -> st.SearchStrategy[str]:
    """Marks and characters in any order, and slices of recorded answers among them."""
    recorded = [recording.text for recording in RECORDINGS.values() if recording.format == name] or [FORCED]
    slices = st.tuples(st.sampled_from(recorded), st.integers(0, 250), st.integers(0, 250)).map(
        lambda drawn: drawn[0][min(drawn[1:]) : max(drawn[1:])]
    )
    return st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4) | slices, max_size=24).map("".join)


def parser_of(name: str, prompt_end: str = "") -> AnswerParser:
    return ForcedCalls() if name == "forced" else format_of(name).parser(prompt_end, TOOLS)


def cut(text: str, places: list[int]) -> Iterator[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    yield from (text[begin:end] for begin, end in pairwise(bounds))


def said(parts: list[Part]) -> str:
    return "".join(part.name if isinstance(part, CallBegan) else part.text for part in parts)


@pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS)
def test_an_answer_has_the_parts_that_its_model_meant(recording: Recording) -> None:
    parser = parser_of(recording.format, recording.prompt_end)
    assert parse(parser, [recording.text]) == recording.parts


@pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS)
def test_an_answer_in_single_characters_has_the_same_parts(recording: Recording) -> None:
    parser = parser_of(recording.format, recording.prompt_end)
    assert parse(parser, recording.text) == recording.parts


@given(recording=st.sampled_from(list(RECORDINGS.values())), places=PLACES)
def test_the_parts_do_not_depend_on_where_an_answer_is_cut(recording: Recording, places: list[int]) -> None:
    parser = parser_of(recording.format, recording.prompt_end)
    assert parse(parser, cut(recording.text, places)) == recording.parts


@pytest.mark.parametrize("name", [*FORMATS, "forced"])
@given(data=st.data(), places=PLACES)
def test_any_text_has_the_same_parts_however_it_is_cut(name: str, data: st.DataObject, places: list[int]) -> None:
    text = data.draw(texts(name))
    whole = parse(parser_of(name), [text])
    assert parse(parser_of(name), cut(text, places)) == whole
    assert parse(parser_of(name), text) == whole


@pytest.mark.parametrize("name", [*FORMATS, "forced"])
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=24))
def test_no_word_of_any_text_is_lost(name: str, fragments: list[str]) -> None:
    text = "".join(f"{fragment}w{index}w" for index, fragment in enumerate(fragments))
    found = said(parse(parser_of(name), [text]))
    assert [f"w{index}w" for index in range(len(fragments)) if f"w{index}w" not in found] == []


@pytest.mark.parametrize("name", [*FORMATS, "forced"])
@given(st.text())
def test_text_without_marks_comes_out_as_it_went_in(name: str, text: str) -> None:
    parts = parse(parser_of(name), [text])
    assert said(parts) == text
    assert all(isinstance(part, Text) for part in parts)


@pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS)
def test_an_answer_that_ends_early_has_the_first_of_its_parts(recording: Recording) -> None:
    for size in range(len(recording.text)):
        whole = parse(parser_of(recording.format, recording.prompt_end), [recording.text[:size]])[:-1]
        assert whole == recording.parts[: len(whole)]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "argu', [Text('<tool_call>\n{"name": "f", "argu')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [CallBegan("f"), CallArguments('{"a": "b')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}', call("f", "{}")),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n', call("f", "{}")),
        ("hermes", "So \n<tool_call>\nno </tool_call>", [Text("So \n<tool_call>\nno </tool_call>")]),
        ("hermes", '<tool_call>{"name": "\\ud800"}', [Text('<tool_call>{"name": "\\ud800"}')]),
        ("hermes", "<think>Hm", [Reasoning("Hm")]),
        ("hermes", "The mark <think> begins", [Text("The mark <think> begins")]),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_v", [Text("<tool_call>f\n<arg_key>a</arg_key>\n<arg_v")]),
        ("qwen3_coder", "<tool_call>\n<function=f>\nno", [Text("<tool_call>\n<function=f>\nno")]),
        ("mistral", "[TOOL_CALLS]f", [Text("[TOOL_CALLS]f")]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a', [CallBegan("f"), CallArguments('{"a')]),
        ("llama3", '{"name": "f", "parameters": {"a": 1', [CallBegan("f"), CallArguments('{"a": 1')]),
        ("llama3", '{"name": "Bob"}', [Text('{"name": "Bob"}')]),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{}\n<|call|>", call("f", "{}")),
        ("gpt_oss", "<|channel|>odd<|message|>Hi<|end|>", [Text("<|channel|>odd<|message|>Hi")]),
        ("gpt_oss", "<|channel|>analysis", [Text("<|channel|>analysis")]),
        ("forced", '[{"name":"f","parameters":{"a":1', [CallBegan("f"), CallArguments('{"a":1')]),
        ("forced", '[{"na', [Text('[{"na')]),
    ],
)
def test_what_is_no_whole_call_is_kept(name: str, text: str, parts: list[Part]) -> None:
    assert parse(parser_of(name), [text]) == parts


def test_arguments_go_out_as_they_come() -> None:
    parser = parser_of("hermes")
    assert parser.feed('<tool_call>{"name": "f", "arguments":') == []
    assert parser.feed(' {"a') == [CallBegan("f"), CallArguments('{"a')]
    assert parser.feed('": "}\\') == [CallArguments('": "}\\')]
    assert parser.feed('"') == [CallArguments('"')]
    assert parser.feed('"}}') == [CallArguments('"}')]


def test_no_more_text_is_held_back_than_may_become_a_mark() -> None:
    parser = parser_of("hermes")
    assert [parser.feed(piece) for piece in ("a <", "t", "x", " \n", "b<tool_call", "!")] == [
        [Text("a")],
        [],
        [Text(" <tx")],
        [],
        [Text(" \nb")],
        [Text("<tool_call!")],
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_no_call_is_looked_for(name: str) -> None:
    text = (
        '{"name": "f", "parameters": {}}<tool_call>f</tool_call>[TOOL_CALLS]f{}<|python_tag|>{}<｜tool▁calls▁begin｜> '
    )
    assert parse(format_of(name).parser(""), text) == [Text(text)]


def test_without_tools_reasoning_and_channels_are_told_apart() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    assert parse(format_of("gpt_oss").parser(""), text) == [Reasoning("Hm."), Text("{}")]
    assert parse(format_of("hermes").parser(""), "<think>Hm.</think>\nHi") == [Reasoning("Hm."), Text("Hi")]


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "text",
    [
        f'<tool_call>{{"name": "f", "arguments": {{"a": {DEEP}',
        f"<tool_call>f<arg_key>a</arg_key><arg_value>{DEEP}</arg_value></tool_call>",
        f"<tool_call><function=note><parameter=tags>{DEEP}</parameter></function></tool_call>",
        f'[TOOL_CALLS][{{"arguments": {{"a": {DEEP}',
        f'{{"name": "f", "parameters": {{"a": {DEEP}',
        DEEP,
    ],
)
@pytest.mark.parametrize("name", [*FORMATS, "forced"])
def test_deep_nesting_is_counted_and_not_followed(name: str, text: str) -> None:
    assert DEEP in said(parse(parser_of(name), [text]))


def test_a_call_that_is_too_long_to_be_held_goes_out_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_HELD_CHARS", 60)
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>" + "v" * 40 + "</arg_value></tool_call>"
    short = text.replace("v" * 40, "v" * 5)
    for pieces in ([text], list(text)):
        assert parse(parser_of("glm45"), pieces) == [Text(text)]
    monkeypatch.setattr(source, "MAX_HELD_CHARS", len(short) - 1)
    assert parse(parser_of("glm45"), [short]) == [Text(short)]
    monkeypatch.setattr(source, "MAX_HELD_CHARS", len(short))
    assert parse(parser_of("glm45"), [short]) == call("f", '{"a": "vvvvv"}')


@pytest.mark.parametrize("name", [*FORMATS, "forced"])
@given(data=st.data(), places=PLACES, limit=st.integers(60, 90))
def test_the_limit_of_held_text_does_not_depend_on_cuts(
    name: str, data: st.DataObject, places: list[int], limit: int
) -> None:
    text = data.draw(texts(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "MAX_HELD_CHARS", limit)
        assert parse(parser_of(name), cut(text, places)) == parse(parser_of(name), [text])


def test_streamed_arguments_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_HELD_CHARS", 60)
    arguments = json.dumps({"a": "v" * 999})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    for pieces in ([text], list(text)):
        assert parse(parser_of("hermes"), pieces) == call("f", arguments)


def test_forced_calls_are_calls_and_nothing_else() -> None:
    assert parse(ForcedCalls(), FORCED) == [*call("weather", '{"city":"Oslo"}'), *call("now", "{}")]


def test_an_answer_forced_to_be_one_call_is_its_arguments() -> None:
    parser = ForcedCall("weather")
    assert parser.feed("") == []
    assert parser.feed('{"ci') == [CallBegan("weather"), CallArguments('{"ci')]
    assert parse(parser, ['ty":1}']) == [CallArguments('ty":1}')]
    assert parse(ForcedCall("weather"), []) == []


def test_joined_parts_keep_their_order() -> None:
    assert joined([Text("a"), Text("b"), Reasoning("c"), Text("d")]) == [Text("ab"), Reasoning("c"), Text("d")]
