"""Text as one line of a log shows it: strangers choose some of it, and must write neither lines nor terminal codes."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with escapes for what does not print."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
