"""What an answer is made of, and the contract of what splits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by the tool's name."""


@dataclass(frozen=True, slots=True)
class Text:
    """Next piece of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Next piece of what the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """Begin of one more call of a tool."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Next piece of the arguments of the call that began last; all pieces joined are one JSON object."""

    text: str


Part: TypeAlias = Text | Reasoning | CallBegan | CallArguments


class AnswerParser(Protocol):
    """One answer's parser. `feed` its text as it comes, then `finish`; the parts do not depend on how it was cut.

    No text raises. What is no well-formed call goes out as Text, as it was written. If the answer ends within a call,
    the arguments so far have gone out, or all of the call's text goes out as Text.
    """

    def feed(self, text: str) -> list[Part]:
        """Adds text; returns the parts that are certain by now."""
        ...

    def finish(self) -> list[Part]:
        """Returns the parts of what was held back; nothing follows."""
        ...
