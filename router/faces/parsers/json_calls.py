"""Calls whose arguments are a JSON object, which goes out as it comes; the formats differ in what stands around it."""

from __future__ import annotations

from router.faces.parsers.grammar import OBJECT, begin_call
from router.faces.parsers.marks import Marks
from router.faces.parsers.parts import CallArguments, CallBegan, Tools
from router.faces.parsers.source import NotACall, Source, Steps

_ARGUMENTS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")
"""Keys that models add, of strings that say nothing of the call."""
ARRAY = Marks("[")
_COLON, _NEXT_KEY, _NEXT_CALL = Marks(":"), Marks(",", "}"), Marks(",", "]")

HERMES = ("<tool_call>", "</tool_call>")
_HERMES_END = Marks(HERMES[1])
LLAMA3 = ("<|python_tag|>",)
_SEMICOLON = Marks(";")
MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_CALL_ID, _ARGS = Marks(MISTRAL[1]), Marks(MISTRAL[2])
DEEPSEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
_CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END = map(Marks, DEEPSEEK[1:])
_FENCE_BEGIN, _FENCE_END = Marks("```json"), Marks("```")


def hermes_call(source: Source, _mark: str, _tools: Tools) -> Steps[None]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    yield from _json_call(source)
    yield from source.begins_with(_HERMES_END)


def llama3_calls(source: Source, mark: str, _tools: Tools) -> Steps[None]:
    """`<|python_tag|>{"name": …, "parameters": {…}}; {…}`, or the object alone, which may be an answer in JSON too."""
    is_bare = mark == "{"
    yield from _json_call(source, is_open=is_bare, wants_arguments=is_bare)
    while (yield from source.begins_with(_SEMICOLON)):
        yield from _json_call(source)


def mistral_calls(source: Source, _mark: str, _tools: Tools) -> Steps[None]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}` of newer models."""
    if (yield from source.begins_with(ARRAY)):
        yield from json_calls(source)
        return
    name = yield from source.name()
    if (yield from source.begins_with(_CALL_ID)):
        yield from source.name()
    yield from source.begins_with(_ARGS)
    yield from source.expect(OBJECT)
    yield from begin_call(source, name)


def deepseek_calls(source: Source, mark: str, _tools: Tools) -> Steps[None]:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` and a fenced object; since V3.1 NAME, separator, object."""
    if mark == DEEPSEEK[0]:
        mark = yield from source.expect(_CALL_BEGIN)
    while mark:
        name = yield from source.name()
        yield from source.expect(_SEPARATOR)
        if not (yield from source.begins_with(OBJECT)):
            name = yield from source.name()
            yield from source.expect(_FENCE_BEGIN)
            yield from source.expect(OBJECT)
        yield from begin_call(source, name)
        yield from source.begins_with(_FENCE_END)
        yield from source.begins_with(_CALL_END)
        source.said()
        mark = yield from source.begins_with(_CALL_BEGIN)
    yield from source.begins_with(_CALLS_END)


def json_calls(source: Source) -> Steps[None]:
    """Calls in an array of which the bracket was taken."""
    mark = ","
    while mark == ",":
        yield from _json_call(source)
        mark = yield from source.expect(_NEXT_CALL)


def _json_call(source: Source, *, is_open: bool = False, wants_arguments: bool = False) -> Steps[None]:
    """A call as an object of name and arguments. `is_open`: its brace was taken.

    Arguments behind the name go out as they come; in front of it they are held until the object is whole.
    """
    if not is_open:
        yield from source.expect(OBJECT)
    name, arguments, is_begun, mark = "", "", False, ","
    while mark == ",":
        key = yield from source.json_string()
        yield from source.expect(_COLON)
        if key == "name" and not name:
            name = yield from source.json_string()
        elif key in _ARGUMENTS and not (arguments or is_begun):
            yield from source.expect(OBJECT)
            if name:
                is_begun = True
                yield from begin_call(source, name)
            else:
                arguments = yield from source.rest_of_json("{")
        elif key in _OTHER_KEYS:
            yield from source.json_string()
        else:
            raise NotACall
        mark = yield from source.expect(_NEXT_KEY)
    if not is_begun:
        if not name or (wants_arguments and not arguments):
            raise NotACall
        yield CallBegan(name)
        yield CallArguments(arguments or "{}")
    source.said()
