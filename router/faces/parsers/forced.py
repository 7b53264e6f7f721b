"""Answers that a grammar forces to be calls and nothing else."""

from __future__ import annotations

from router.faces.parsers.grammar import NO_MARKS, GrammarParser, attempt
from router.faces.parsers.json_calls import ARRAY, json_calls
from router.faces.parsers.parts import AnswerParser, CallArguments, CallBegan, Part, Text
from router.faces.parsers.source import Source, Steps


class ForcedCalls(GrammarParser):
    """Parser of `[{"name":"…","parameters":{…}},…]`."""

    def __init__(self) -> None:
        super().__init__(_forced_calls)


class ForcedCall(AnswerParser):
    """Parser of an answer that is the arguments of one call of a known tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_begun = False

    def feed(self, text: str) -> list[Part]:
        """Returns the text as arguments; the first text begins the call."""
        if not text:
            return []
        began: list[Part] = [] if self._is_begun else [CallBegan(self._name)]
        self._is_begun = True
        return [*began, CallArguments(text)]

    def finish(self) -> list[Part]:
        """Returns nothing: no text is held back."""
        return []


def _forced_calls(source: Source) -> Steps[None]:
    if (yield from source.begins_with(ARRAY)):
        yield from attempt(source, json_calls(source))
    yield from source.text_until(NO_MARKS, Text)
