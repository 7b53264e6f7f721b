from __future__ import annotations

import pytest

from router.faces.parsers.formats import detect_format
from router.faces.parsers.parts import Reasoning, Text
from tests.unit.router.recorded_answers import EOT, PYTHON_TAG, TEMPLATES, format_of, parse


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_shows_its_format(name: str) -> None:
    found = format_of(name)
    assert (found.name, found.calls_tools) == (name, name != "plain")


def test_without_a_template_an_answer_is_text() -> None:
    found = detect_format(None, {"<tool_call>"})
    assert (found.name, found.calls_tools, found.has_special_marks) == ("plain", False, False)
    assert parse(found.parser(""), "<think>a") == [Text("<think>a")]


def test_llama32_is_known_by_its_keys_and_its_special_token() -> None:
    template = """{{ '{"name": "' + name + '", ' }}{{ '"parameters": ' }}"""
    assert detect_format(template, {PYTHON_TAG}).name == "llama3"
    assert detect_format(template, {EOT}).name == "plain"


def test_a_hermes_model_trained_on_llama_is_of_hermes_format() -> None:
    assert detect_format(TEMPLATES["hermes"], {PYTHON_TAG}).name == "hermes"


@pytest.mark.parametrize(
    ("name", "special", "has_special_marks"),
    [
        ("hermes", "<|im_end|>", False),
        ("hermes", "<tool_call>", True),
        ("hermes", "</think>", True),
        ("llama3", PYTHON_TAG, True),
        ("glm45", "<arg_key>", True),
        ("gpt_oss", "<|channel|>", True),
        ("mistral", "[THINK]", True),
        ("deepseek_v3", "<｜tool▁sep｜>", True),
        ("plain", "<tool_call>", False),
    ],
)
def test_marks_are_special_if_the_tokenizer_says_so(name: str, special: str, has_special_marks: bool) -> None:
    assert detect_format(TEMPLATES[name], [special]).has_special_marks is has_special_marks


def test_a_template_may_know_reasoning_and_no_calls() -> None:
    found = detect_format("{{ '<think>\\n' }}", set())
    assert (found.name, found.calls_tools) == ("plain", False)
    assert parse(found.parser("<think>\n"), "a</think>b") == [Reasoning("a"), Text("b")]


@pytest.mark.parametrize(
    ("prompt_end", "is_inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nI was told", True),
        ("<think>\n\n</think>\n\n", False),
        ("</think> <think>", True),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_the_end_of_the_prompt_says_whether_the_answer_begins_inside_reasoning(
    prompt_end: str, is_inside: bool
) -> None:
    found = detect_format(TEMPLATES["hermes"], {"<|im_start|>", "<|im_end|>", ""})
    assert parse(found.parser(prompt_end), "Hm") == [Reasoning("Hm") if is_inside else Text("Hm")]


def test_a_model_that_repeats_the_mark_of_its_prompt_thinks_once() -> None:
    assert parse(format_of("hermes").parser("<think>\n"), "<think>a</think>\n\nb") == [Reasoning("a"), Text("b")]
