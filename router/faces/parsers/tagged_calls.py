"""Calls whose arguments are written one by one between tags, without types: those are in the tool's schema.

A call is held until it is whole. Its values are put into the JSON object as they were written, never decoded and
encoded again: numbers keep all their digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from router.faces.parsers.marks import Marks
from router.faces.parsers.parts import CallArguments, CallBegan, Tools
from router.faces.parsers.source import Source, Steps


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Tags of a format; an empty one is not written."""

    opening: tuple[str, ...]
    """Marks of which each begins a call."""
    name_begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    end: tuple[str, ...]
    """Marks of which the first is always written at the end of a call."""
    newline: str
    """What templates put on both sides of a value."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Tags that may be special tokens."""
        tags = (self.key_begin, self.key_end, self.value_begin, self.value_end)
        return tuple(tag for tag in (*self.opening, *tags, *self.end) if tag)

    def take(self, source: Source, mark: str, tools: Tools) -> Steps[None]:
        """Takes a call behind its opening mark."""
        if mark != self.name_begin:
            yield from _tag(source, self.name_begin)
        name = yield from source.name()
        yield from _tag(source, self.name_end)
        arguments: list[str] = []
        end, key_begin = Marks(self.end[0]), Marks(self.key_begin)
        while not (yield from source.begins_with(end)):
            yield from source.expect(key_begin)
            key = (yield from source.until(Marks(self.key_end))).strip()
            yield from _tag(source, self.value_begin)
            value = yield from source.until(Marks(self.value_end, spaced=False))
            value = value.removeprefix(self.newline).removesuffix(self.newline)
            arguments.append(f"{_quoted(key)}: {_as_json(value, _types(tools.get(name), key))}")
        yield CallBegan(name)
        yield CallArguments("{" + ", ".join(arguments) + "}")
        source.said()
        for tag in self.end[1:]:
            yield from source.begins_with(Marks(tag))


QWEN3_CODER = TaggedCalls(
    opening=("<tool_call>", "<function="),  # models leave out the first at times
    name_begin="<function=",
    name_end=">",
    key_begin="<parameter=",
    key_end=">",
    value_begin="",
    value_end="</parameter>",
    end=("</function>", "</tool_call>"),
    newline="\n",
)
GLM45 = TaggedCalls(
    opening=("<tool_call>",),
    name_begin="",
    name_end="",
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    end=("</tool_call>",),
    newline="",
)


def _tag(source: Source, tag: str) -> Steps[None]:
    if tag:
        yield from source.expect(Marks(tag))


def _types(schema: object, key: str) -> frozenset[str]:
    """Types that a schema of parameters allows for one of them; none = it does not say."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return frozenset(_types_of(properties.get(key))) if isinstance(properties, Mapping) else frozenset()


def _types_of(schema: object) -> Iterator[str]:
    """Types of a value, those of its alternatives too, which Optional and Union become in schemas made from code."""
    if not isinstance(schema, Mapping):
        return
    alternatives = [each for key in ("anyOf", "oneOf") for each in _list(schema.get(key)) if isinstance(each, Mapping)]
    for declared in (each.get("type") for each in [schema, *alternatives]):
        yield from (each for each in _list(declared) or [declared] if isinstance(each, str))


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _as_json(value: str, types: frozenset[str]) -> str:
    """The JSON text of a value; a string, if its type is one or the value does not read as anything else."""
    if "string" in types and not (value == "null" and "null" in types):
        return _quoted(value)
    lower = value.strip().lower()
    if "boolean" in types and lower in ("true", "false"):
        return lower
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(value)
    return value.strip()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
