"""What the grammars of all formats share: the parser that runs one, reasoning, and a call that may be none."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from router.faces.parsers.marks import Marks
from router.faces.parsers.parts import AnswerParser, CallArguments, CallBegan, Part, Reasoning, Text
from router.faces.parsers.source import NotACall, Source, Steps

OBJECT = Marks("{")
NO_MARKS = Marks()
_NEWLINES = re.compile("\n*")


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The two marks between which a model writes its reasoning."""

    begin: str
    end: str


class GrammarParser(AnswerParser):
    """Runs a grammar over an answer's text."""

    def __init__(self, grammar: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = grammar(self._source)

    def feed(self, text: str) -> list[Part]:
        """Runs the grammar until it needs more text."""
        self._source.add(text)
        return self._parts()

    def finish(self) -> list[Part]:
        """Runs the grammar to its end."""
        self._source.end()
        return self._parts()

    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        while (part := next(self._steps, None)) is not None:
            parts.append(part)
        return parts


def reasoning(source: Source, marks: ThinkingMarks, *, is_begun: bool) -> Steps[None]:
    """Reasoning in front of the answer proper; behind that its marks are text, for an answer may be about them.

    `is_begun`: the prompt holds its first mark. Some models write that once more.
    """
    begin, end = Marks(marks.begin), Marks(marks.end, spaced=False)
    while (yield from source.begins_with(begin)) or is_begun:
        is_begun = False
        source.said()
        yield from source.text_until(end, Reasoning)
        source.said()
        yield from source.skip(_NEWLINES)


def attempt(source: Source, call: Steps[None]) -> Steps[None]:
    """Parts of a call; what is held goes out as text if it is none. White space behind a call is dropped."""
    try:
        yield from call
        source.said()
    except NotACall:
        pass
    if held := source.release():
        yield Text(held)
    else:
        yield from source.skip_space()


def begin_call(source: Source, name: str) -> Steps[None]:
    """A call whose name is known and of whose arguments the first brace was taken: from here on it is one."""
    yield CallBegan(name)
    source.said()
    yield from source.rest_of_json("{", CallArguments)
