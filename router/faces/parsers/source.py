"""An answer's text, which a grammar takes from the front while it comes.

said │ held: taken, and goes out as Text if this is no call │ not taken yet │ still to come

A grammar is a generator (`Steps`): it yields parts, and None whenever more text must come before it goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from router.faces.parsers.json_span import JsonSpan
from router.faces.parsers.marks import Marks
from router.faces.parsers.parts import Part

MAX_HELD_CHARS = 1 << 20
"""A call of which more must be held before it is known to be one goes out as text: bounds the memory of an answer."""
_NAME = re.compile(r"""[^\s<>\[\]{}"'`]*""")
_SPACE = re.compile(r"[ \t\r\n]*")

_T = TypeVar("_T")
Steps: TypeAlias = Generator[Part | None, None, _T]


class NotACall(Exception):
    """What was taken is no call, or no whole one."""


class Source:
    """Text of one answer. Its steps raise NotACall where the text in front is not what they take."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Number of characters of `_text` that steps have taken."""
        self._is_ended = False
        self._held: list[str] = []
        self._num_held_chars = 0

    def add(self, text: str) -> None:
        """Adds text that came."""
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        """Marks that no more text comes."""
        self._is_ended = True

    def said(self) -> None:
        """Drops what is held: parts say it."""
        self._held.clear()
        self._num_held_chars = 0

    def release(self) -> str:
        """Returns what is held, and holds it no more."""
        held = "".join(self._held)
        self.said()
        return held

    def text_until(self, marks: Marks, kind: Callable[[str], Part]) -> Steps[str]:
        """Gives out text as parts of a kind up to the first mark, holds that and returns it; "" = the answer ended."""
        while (found := marks.find(self._text, self._at)) is None:
            cut = len(self._text) if self._is_ended else marks.held_from(self._text, self._at)
            if cut > self._at:
                yield kind(self._take(cut))
            if self._is_ended:
                return ""
            yield None
        begin, end, mark = found
        if begin > self._at:
            yield kind(self._take(begin))
        self._hold(end)
        return mark

    def begins_with(self, marks: Marks) -> Steps[str]:
        """Holds the mark in front and returns it; takes nothing and returns "" if there is none."""
        while (found := marks.match(self._text, self._at)) is None:
            if self._is_ended or marks.held_from(self._text, self._at) > self._at:
                return ""
            yield None
        self._hold(found[0])
        return found[1]

    def expect(self, marks: Marks) -> Steps[str]:
        """Holds the mark in front, and returns it."""
        mark = yield from self.begins_with(marks)
        if not mark:
            raise NotACall
        return mark

    def until(self, marks: Marks) -> Steps[str]:
        """Holds text up to the first mark, and that too; returns the text before it."""
        pieces: list[str] = []
        while (found := marks.find(self._text, self._at)) is None:
            pieces.append(self._hold(marks.held_from(self._text, self._at)))
            yield from self._more()
        pieces.append(self._hold(found[0]))
        self._hold(found[1])
        return "".join(pieces)

    def name(self) -> Steps[str]:
        """Holds a name as models write it without quotes, and returns it."""
        yield from self._all_of(_SPACE)
        name = yield from self._all_of(_NAME)
        if not name:
            raise NotACall
        return name

    def skip_space(self) -> Steps[None]:
        """Drops white space in front."""
        return self.skip(_SPACE)

    def skip(self, pattern: re.Pattern[str]) -> Steps[None]:
        """Drops all characters in front that are of a pattern, a repeated class."""
        while True:
            self._take(self._end_of(pattern))
            if self._at < len(self._text) or self._is_ended:
                return
            yield None

    def json_string(self) -> Steps[str]:
        """Holds a JSON string, and returns its value."""
        text = yield from self.rest_of_json((yield from self.expect(_QUOTE)))
        try:
            value = str(json.loads(text, strict=False))
            value.encode()  # half a surrogate pair is no text
        except ValueError as error:
            raise NotACall from error
        return value

    def rest_of_json(self, opening: str, kind: Callable[[str], Part] | None = None) -> Steps[str]:
        """Takes the JSON value of which the first character was taken.

        Its pieces go out as parts of a kind as they come; without one they are held, and the value's text is returned.
        """
        span, pieces = JsonSpan(opening), [opening]
        while True:
            end = span.end(self._text, self._at)
            take = self._hold if kind is None else self._take
            pieces.append(take(len(self._text) if end is None else end))
            if kind is not None and (piece := "".join(pieces)):
                yield kind(piece)
                pieces.clear()
            if end is not None:
                return "".join(pieces)
            yield from self._more()

    def _all_of(self, pattern: re.Pattern[str]) -> Steps[str]:
        pieces: list[str] = []
        while True:
            pieces.append(self._hold(self._end_of(pattern)))
            if self._at < len(self._text) or self._is_ended:
                return "".join(pieces)
            yield None

    def _end_of(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._text, self._at)
        return self._at if found is None else found.end()

    def _more(self) -> Steps[None]:
        if self._is_ended:
            raise NotACall
        yield None

    def _hold(self, end: int) -> str:
        room = self._at + MAX_HELD_CHARS - self._num_held_chars
        held = self._take(min(end, room))
        self._held.append(held)
        self._num_held_chars += len(held)
        if end > room:
            raise NotACall
        return held

    def _take(self, end: int) -> str:
        taken = self._text[self._at : end]
        self._at = end
        return taken


_QUOTE = Marks('"')
