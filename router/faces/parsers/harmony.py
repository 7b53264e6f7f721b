"""The messages of gpt-oss: each has a header that names its channel and, for a call, the tool.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The prompt ends behind `<|start|>assistant`. What has no header is text, and so is a header that is none.
"""

from __future__ import annotations

import re

from router.faces.parsers.grammar import OBJECT, begin_call
from router.faces.parsers.marks import Marks
from router.faces.parsers.parts import Reasoning, Text
from router.faces.parsers.source import NotACall, Source, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CLOSING = ("<|end|>", "<|return|>", "<|call|>")
HARMONY = (START, CHANNEL, MESSAGE, *_CLOSING, "<|constrain|>")
_HEADER_BEGIN = Marks(START, CHANNEL, "to=")
"""`to=`: the tool's name may stand before the channel too."""
_HEADER_END = Marks(MESSAGE, spaced=False)
_MESSAGE_END = Marks(START, CHANNEL, *_CLOSING, spaced=False)
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?\s*+(?:to=(?P<to>[^\s<]+)\s*+)?"
    r"<\|channel\|>(?P<channel>analysis|commentary|final)\b\s*+(?:to=(?P<recipient>[^\s<]+)\s*+)?"
    r"(?:<\|constrain\|>\s*+)?(?:\w++\s*+)?"
)
"""The last word is the type of the content. Possessive repetitions: a header of white space alone takes linear time."""
_OWN_TOOLS = "functions."
"""Namespace of the tools that a request brings."""


def messages(source: Source, *, has_tools: bool) -> Steps[None]:
    """Messages one after the other. `has_tools`: what is sent to a tool is a call; else it is what its channel is."""
    mark = _CLOSING[0]
    while mark:
        if mark in _CLOSING:
            source.said()
            mark = yield from source.begins_with(_HEADER_BEGIN)
        kind = (yield from _opened(source, mark, has_tools)) if mark else Text
        mark = yield from source.text_until(_MESSAGE_END, kind)


def _opened(source: Source, mark: str, has_tools: bool) -> Steps[type[Text] | type[Reasoning]]:
    """Takes the header of which a mark was taken, and a call whole; returns what the text behind is."""
    try:
        header = _HEADER.fullmatch(mark + (yield from source.until(_HEADER_END)))
        if header is None:
            raise NotACall
        recipient = header["to"] or header["recipient"]
        if recipient and has_tools:
            yield from source.expect(OBJECT)
            yield from begin_call(source, recipient.removeprefix(_OWN_TOOLS))
            yield from source.skip_space()
            return Text
        source.said()
        return Reasoning if header["channel"] == "analysis" else Text
    except NotACall:
        if held := source.release():
            yield Text(held)
        return Text
