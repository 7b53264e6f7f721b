"""How far one JSON value reaches in text that comes in pieces."""

from __future__ import annotations

import re

_OF_STRINGS = re.compile(r'["\\]')
_OF_STRUCTURE = re.compile(r'["{}\[\]]')


class JsonSpan:
    """One string, object or array behind its first character; counts depth, knows strings, checks nothing else."""

    def __init__(self, opening: str) -> None:
        """`opening`: the first character of the value: `"`, `{` or `[`."""
        self._in_string = opening == '"'
        self._depth = 0 if self._in_string else 1
        self._num_escaped = 0
        """1 if a backslash ended the last piece, else 0."""

    def end(self, text: str, start: int) -> int | None:
        """Returns where the value ends in `text[start:]`, its next piece; None if it goes on behind that."""
        at = start + self._num_escaped
        while found := (_OF_STRINGS if self._in_string else _OF_STRUCTURE).search(text, at):
            at = found.end()
            match found[0]:
                case "\\":
                    at += 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if not self._in_string and self._depth <= 0:
                return at
        self._num_escaped = max(0, at - len(text))
        return None
