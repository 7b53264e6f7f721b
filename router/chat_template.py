"""Renders conversations as `transformers`' apply_chat_template does, without transformers.

The template comes with the checkpoint: chat_template.jinja, else tokenizer_config.json. It runs
in Jinja's sandbox, sees plain data only, and has the same globals, filters and options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import CheckpointError, InvalidRequest

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One checkpoint's template, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CheckpointError if `source` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"chat template: line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the assistant speaks. Raises InvalidRequest if the template refuses."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise InvalidRequest("chat.messages", _refusal(error.message or "", messages)) from error
        # A template is a program of the checkpoint's author: what it raises on odd input is open.
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InvalidRequest("chat.messages", f"the model's template fails: {type(error).__name__}") from error


def _refusal(why: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The template's own words, unless they quote a message: errors do not repeat prompts."""
    quotes = any(message.get("content", "") in why for message in messages if message.get("content"))
    return "the model's template refuses them" + ("" if quotes or not why else f": {why}")


def load_chat_template(path: Path) -> ChatTemplate | None:
    """The template of a checkpoint folder; None if it has none. Raises CheckpointError."""
    config = _read_json(path / "tokenizer_config.json")
    source = _template_source(path, config)
    if source is None:
        return None
    special = {**_read_json(path / "special_tokens_map.json"), **config}
    tokens = {name: _token_text(special[name]) for name in _SPECIAL_TOKENS if special.get(name) is not None}
    return ChatTemplate(source, tokens)


def _template_source(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = next((each["template"] for each in source if each["name"] == "default"), None)
    return source if isinstance(source, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({type(error).__name__})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return values


def _token_text(value: Any) -> str:
    """A special token is written as text or as an object with `content`."""
    return str(value["content"]) if isinstance(value, dict) else str(value)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; to serve, it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare them)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return str(caller())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # templates may pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; transformers' does not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as in transformers
