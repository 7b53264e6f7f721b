"""The format in which a model writes calls and reasoning, by its chat template and its special tokens.

answer := reasoning* (text | call)*, in all formats but that of gpt-oss
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from router.faces.parsers import harmony, json_calls, tagged_calls
from router.faces.parsers.grammar import NO_MARKS, OBJECT, GrammarParser, ThinkingMarks, attempt, reasoning
from router.faces.parsers.marks import Marks
from router.faces.parsers.parts import AnswerParser, Text, Tools
from router.faces.parsers.source import Source, Steps

NO_TOOLS: Tools = MappingProxyType({})
_THINKING = (ThinkingMarks("<think>", "</think>"), ThinkingMarks("[THINK]", "[/THINK]"))
_GPT_OSS, _LLAMA3, _PLAIN = "gpt_oss", "llama3", "plain"


@dataclass(frozen=True, slots=True)
class _Calls:
    """How calls are written."""

    take: Callable[[Source, str, Tools], Steps[None]]
    """Takes what is behind an opening mark."""
    marks: tuple[str, ...]
    """Marks of calls that the tokenizer may have as special tokens."""
    opening: Marks
    opening_at_start: Marks = NO_MARKS
    """Marks that open a call only where the answer proper begins."""


_CALLS: Mapping[str, _Calls] = {
    "qwen3_coder": _Calls(
        tagged_calls.QWEN3_CODER.take, tagged_calls.QWEN3_CODER.marks, Marks(*tagged_calls.QWEN3_CODER.opening)
    ),
    "glm45": _Calls(tagged_calls.GLM45.take, tagged_calls.GLM45.marks, Marks(*tagged_calls.GLM45.opening)),
    "hermes": _Calls(json_calls.hermes_call, json_calls.HERMES, Marks(json_calls.HERMES[0])),
    "deepseek_v3": _Calls(json_calls.deepseek_calls, json_calls.DEEPSEEK, Marks(*json_calls.DEEPSEEK[:2])),
    "deepseek_v31": _Calls(json_calls.deepseek_calls, json_calls.DEEPSEEK, Marks(*json_calls.DEEPSEEK[:2])),
    "mistral": _Calls(json_calls.mistral_calls, json_calls.MISTRAL, Marks(json_calls.MISTRAL[0])),
    _LLAMA3: _Calls(json_calls.llama3_calls, json_calls.LLAMA3, Marks(*json_calls.LLAMA3), OBJECT),
}
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (_GPT_OSS, (harmony.START, harmony.CHANNEL, harmony.MESSAGE)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm45", ("<arg_key>",)),
    ("hermes", ("<tool_call>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    (_LLAMA3, ("<|python_tag|>",)),
)
"""Texts that are all in a template of the format; the first format of which that is true is the template's."""
_SIGN_OF_LLAMA32 = '"parameters"'
"""Templates of Llama 3.2 have this, and not the special token with which calls may begin."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes calls and reasoning.

    calls_tools          a format of calls is known
    has_special_marks    marks are special tokens: text must be decoded with special tokens kept
    special_tokens       tokens that end what the model thought in a turn before
    """

    name: str
    calls_tools: bool
    has_special_marks: bool
    thinking: ThinkingMarks | None = None
    special_tokens: frozenset[str] = frozenset()

    @property
    def marks_reasoning(self) -> bool:
        """Whether answers may hold reasoning."""
        return self.thinking is not None or self.name == _GPT_OSS

    def parser(self, prompt_end: str, tools: Tools = NO_TOOLS) -> AnswerParser:
        """Returns the parser of one answer. Without tools no calls are looked for.

        `prompt_end`: the text of the prompt's last tokens, special tokens kept; the answer may begin inside reasoning.
        """
        if self.name != _GPT_OSS:
            return GrammarParser(partial(self._answer, is_begun=self._begins_inside(prompt_end), tools=tools))
        parser = GrammarParser(partial(harmony.messages, has_tools=bool(tools)))
        _, start, opened = prompt_end.rpartition(harmony.START)
        if harmony.CHANNEL in opened:
            parser.feed(start + opened)
        return parser

    def _begins_inside(self, prompt_end: str) -> bool:
        if self.thinking is None:
            return False
        _, begin, behind = prompt_end.rpartition(self.thinking.begin)
        is_over = self.thinking.end in behind or any(token in behind for token in self.special_tokens)
        return bool(begin) and not is_over

    def _answer(self, source: Source, *, is_begun: bool, tools: Tools) -> Steps[None]:
        if self.thinking is not None:
            yield from reasoning(source, self.thinking, is_begun=is_begun)
        if self.name not in _CALLS or not tools:
            yield from source.text_until(NO_MARKS, Text)
            return
        calls = _CALLS[self.name]
        mark = yield from source.begins_with(calls.opening_at_start)
        while mark or (mark := (yield from source.text_until(calls.opening, Text))):
            yield from attempt(source, calls.take(source, mark, tools))
            mark = ""


def detect_format(template: str | None, special_tokens: Collection[str]) -> AnswerFormat:
    """Returns the format that a chat template shows; what it does not show is not looked for in answers."""
    if template is None:
        return AnswerFormat(_PLAIN, calls_tools=False, has_special_marks=False)
    name = next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), _PLAIN)
    if name == _PLAIN and json_calls.LLAMA3[0] in special_tokens and _SIGN_OF_LLAMA32 in template:
        name = _LLAMA3
    found = (each for each in _THINKING if each.begin in template or each.end in template)
    thinking = None if name == _GPT_OSS else next(found, None)
    marks = harmony.HARMONY if name == _GPT_OSS else _CALLS[name].marks if name in _CALLS else ()
    marks = (*marks, thinking.begin, thinking.end) if thinking is not None else marks
    return AnswerFormat(
        name,
        calls_tools=name != _PLAIN,
        has_special_marks=not set(special_tokens).isdisjoint(marks),
        thinking=thinking,
        special_tokens=frozenset(special_tokens) - {*marks, ""},
    )
