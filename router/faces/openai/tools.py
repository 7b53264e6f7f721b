"""Tools that a model may call, and the choice among them; the same for OpenAI's and Anthropic's requests."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from router.faces.openai.sampling import ANY_OBJECT, COMPACT
from router.faces.parsers.forced import ForcedCall, ForcedCalls
from router.faces.parsers.formats import AnswerFormat
from router.faces.parsers.parts import AnswerParser
from tandem.errors import InvalidRequest, UnsupportedOption

MAX_TOOLS = 1024
"""Most tools of a request; each is rendered into the prompt, whose bytes are bounded too."""


class Choice(Enum):
    """Whether a call must, may, or must not be made."""

    NONE = auto()
    AUTO = auto()
    REQUIRED = auto()


_CHOICES = {"none": Choice.NONE, "auto": Choice.AUTO, "required": Choice.REQUIRED}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments; None = any object."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """Returns the schema of its arguments, which are always an object."""
        return {**(self.parameters or {}), **ANY_OBJECT}

    def to_json(self) -> str:
        """Returns the tool as templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return json.dumps(
            {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
        )


@dataclass(frozen=True, slots=True)
class Tools:
    """All tools of a request, with the choice among them."""

    tools: Sequence[Tool] = ()
    choice: Choice = Choice.NONE
    only: str | None = None
    """With REQUIRED, the one tool that must be called."""
    parallel: bool = True
    """Whether there may be several calls."""
    by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the tools that may be called."""

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: Choice | str | None, *, parallel: bool = True) -> Tools:
        """`choice`: a tool's name = that one; None = AUTO if there are tools. Raises InvalidRequest."""
        if len(tools) > MAX_TOOLS:
            raise InvalidRequest("tools", f"{len(tools)} tools exceed the limit of {MAX_TOOLS}")
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names) or "" in names:
            raise InvalidRequest("tools", "each must have a name of its own")
        if isinstance(choice, str) and choice not in names:
            raise InvalidRequest("tool_choice", "names none of the tools")
        if choice is Choice.REQUIRED and not tools:
            raise InvalidRequest("tool_choice", "there are no tools")
        if not tools or choice is Choice.NONE:
            return cls()
        by_name = {tool.name: tool.schema for tool in tools}
        if isinstance(choice, str):
            return cls(tools, Choice.REQUIRED, choice, parallel, by_name)
        return cls(tools, choice or Choice.AUTO, None, parallel, by_name)

    def constraint(self) -> dict[str, str]:
        """Returns the field of SamplingRequest that makes the model call; empty where it need not."""
        if self.choice is not Choice.REQUIRED:
            return {}
        if self.only is not None:
            return {"json_schema": json.dumps({**self.by_name[self.only], "x-guidance": COMPACT})}
        # A schema's own references are absolute: each schema stands whole below $defs, and they are led there.
        calls = {
            "type": "array",
            "minItems": 1,
            **({} if self.parallel else {"maxItems": 1}),
            "items": {"anyOf": [_call(index, name) for index, name in enumerate(self.by_name)]},
            "$defs": {f"tool{index}": _moved(each, index) for index, each in enumerate(self.by_name.values())},
            "x-guidance": COMPACT,
        }
        return {"json_schema": json.dumps(calls)}

    def parser(self, answers: AnswerFormat, prompt_end: str) -> AnswerParser:
        """Returns the parser of one choice's text."""
        if self.choice is Choice.REQUIRED:
            return ForcedCalls() if self.only is None else ForcedCall(self.only)
        return answers.parser(prompt_end, self.by_name if self.choice is Choice.AUTO else {})

    def check(self, answers: AnswerFormat) -> None:
        """Raises UnsupportedOption if calls in the model's answers could not be told from text."""
        if self.choice is Choice.AUTO and not answers.calls_tools:
            raise UnsupportedOption(
                "tool_choice",
                "auto needs a model whose chat template has a known form of calls; required, a named tool and none "
                "work with every model",
            )


def tool_choice(given: str | dict[str, Any] | None) -> Choice | str | None:
    """Returns the choice of OpenAI's APIs, or the name of the one tool. Raises InvalidRequest."""
    if given is None:
        return None
    if isinstance(given, str):
        if given not in _CHOICES:
            raise InvalidRequest("tool_choice", f"takes {', '.join(_CHOICES)}, or a function's name as an object")
        return _CHOICES[given]
    function = given.get("function") if given.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, dict) else given.get("name")
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice", 'as an object, is {"type": "function", "function": {"name": …}}')
    return name


def new_call_id(prefix: str = "call_") -> str:
    """Returns the id of a call, for its result to name."""
    return prefix + secrets.token_hex(12)


def _call(index: int, name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool{index}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, index: int) -> Any:
    """Returns a schema whose references lead below its new place."""
    if isinstance(schema, list):
        return [_moved(each, index) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/tool{index}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, index)
        for key, value in schema.items()
    }
