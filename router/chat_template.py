"""Reads conversations and renders them as `transformers`' apply_chat_template does, without transformers.

The template comes with the checkpoint: chat_template.jinja, else tokenizer_config.json. It runs
in Jinja's sandbox, sees plain data only, and has the same globals, filters and options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.files.gguf import read_gguf
from models.files.gguf_tokenizer import gguf_settings
from router.request import ChatPrompt
from tandem.errors import CheckpointError, InvalidRequest

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT, _TOOL_USE = "default", "tool_use"
"""Names of templates in transformers."""
_LOOP_OVER_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w*(\.content|\[['\"]content['\"]\]|content\b)")
_OWN = frozenset({"messages", "tools"})
"""Names that no variable may have: fields of the conversation."""
_OF_THE_FORMAT = frozenset({"role", "type"})
"""Keys whose values are not the caller's own words."""
_ASKS_FOR_NONE = re.compile(r"\bcontent['\"]?\]?\s+is\s+none\b")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat as templates take it: plain data, with the caller's JSON read.

    messages    role, content (text, or a list of `{"type": "text", "text": …}`), tool_calls, tool_call_id, name, …
    tools       as OpenAI's API has them
    variables   whatever a template asks for, such as Qwen3's `enable_thinking`
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    template_name: str = ""

    def texts(self) -> Iterator[str]:
        """Yields every text of the conversation that is no word of the format."""
        for each in (*self.messages, *self.tools, self.variables):
            yield from _texts(each, _OF_THE_FORMAT)


def read_conversation(prompt: ChatPrompt) -> Conversation:
    """Raises InvalidRequest naming the field whose JSON is none, or is no object where one is wanted."""
    messages = [_with_arguments(message, f"chat.messages[{index}]") for index, message in enumerate(prompt.messages)]
    tools = [_object(text, f"chat.tools[{index}]") for index, text in enumerate(prompt.tools)]
    if taken := sorted(_OWN & prompt.variables.keys()):
        raise InvalidRequest("chat.template_variables", f"{taken[0]} is a field of its own")
    variables = {name: _json(text, f"chat.template_variables[{name}]") for name, text in prompt.variables.items()}
    return Conversation(messages, tools, variables, prompt.template_name)


def num_bytes(prompt: ChatPrompt) -> int:
    """Returns the bytes of all text that the caller sent."""
    parts = (*prompt.messages, *prompt.tools, *prompt.variables.values())
    return sum(len(text.encode()) for part in parts for text in _texts(part))


def _with_arguments(message: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Parses arguments: templates write them as JSON, and so get them as data."""
    if "tool_calls" not in message:
        return message
    calls = []
    for index, call in enumerate(message["tool_calls"]):
        function = call["function"]
        arguments = _object(function["arguments"] or "{}", f"{path}.tool_calls[{index}].arguments")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _object(text: str, path: str) -> dict[str, Any]:
    value = _json(text, path)
    if not isinstance(value, dict):
        raise InvalidRequest(path, "must be a JSON object")
    return value


def _json(text: str, path: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(path, "is no JSON") from error


def _texts(value: Any, without: frozenset[str] = frozenset()) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in without:
                yield from _texts(each, without)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each, without)


class ChatTemplate:
    """A checkpoint's template, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CheckpointError if `source` is not a template."""
        self.source = source
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
        self._special_tokens: dict[str, Any] = dict(special_tokens)
        self._knows_parts = _LOOP_OVER_PARTS.search(source) is not None
        self._asks_for_none = _ASKS_FOR_NONE.search(source) is not None

    def render(self, conversation: Conversation) -> str:
        """The prompt up to where the assistant speaks. Raises InvalidRequest if the template refuses."""
        messages = conversation.messages if self._knows_parts else [_joined(each) for each in conversation.messages]
        if self._asks_for_none:
            messages = [_without_text(each) for each in messages]
        variables = (
            {"documents": None, "add_generation_prompt": True} | self._special_tokens | dict(conversation.variables)
        )
        try:
            return self._template.render(variables | {"messages": messages, "tools": conversation.tools or None})
        except TemplateError as error:
            raise InvalidRequest("chat.messages", _refusal(error.message or "", conversation)) from error
        # A template is a program of the checkpoint's author: what it raises on odd input is open.
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InvalidRequest("chat.messages", f"the model's template fails: {type(error).__name__}") from error


class ChatTemplates:
    """All templates of a checkpoint, by name."""

    def __init__(self, templates: Mapping[str, ChatTemplate]) -> None:
        self._templates = templates

    @property
    def source(self) -> str | None:
        """The text of the template for tools, else of the usual one."""
        template = self._templates.get(_TOOL_USE) or self._templates.get(_DEFAULT)
        return None if template is None else template.source

    def render(self, conversation: Conversation) -> str:
        """As the template that the conversation names, or else the one for what it holds. Raises InvalidRequest."""
        for_tools = bool(conversation.tools) and _TOOL_USE in self._templates
        name = conversation.template_name or (_TOOL_USE if for_tools else _DEFAULT)
        if name not in self._templates:
            raise InvalidRequest("chat.template_name", f"the model has {', '.join(sorted(self._templates))}")
        return self._templates[name].render(conversation)


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """For a template that takes a turn's content for text."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _without_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """For a template that tells a turn of calls alone by a content of none, such as DeepSeek-R1's distilled models'."""
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message


def _refusal(why: str, conversation: Conversation) -> str:
    """The template's own words, unless they quote what the caller sent: errors do not repeat prompts."""
    quotes = any(text in why for text in conversation.texts() if text)
    return "the model's template refuses them" + ("" if quotes or not why else f": {why}")


def load_chat_template(path: Path, file: Path | None = None) -> ChatTemplates | None:
    """The templates of a checkpoint folder or GGUF file, or that of `file`; None if there are none.

    Raises CheckpointError.
    """
    config = gguf_settings(read_gguf(path)) if path.is_file() else _read_json(path / "tokenizer_config.json")
    sources = _template_sources(path, config) if file is None else {_DEFAULT: _read_template(file)}
    if not sources:
        return None
    special = {**_read_json(path / "special_tokens_map.json"), **config}
    tokens = {name: _token_text(special[name]) for name in _SPECIAL_TOKENS if special.get(name) is not None}
    return ChatTemplates({name: ChatTemplate(source, tokens) for name, source in sources.items()})


def _template_sources(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; files count before what tokenizer_config.json says."""
    told = config.get("chat_template")
    sources = {each["name"]: each["template"] for each in told} if isinstance(told, list) else {}
    if isinstance(told, str):
        sources[_DEFAULT] = told
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    if (file := path / "chat_template.jinja").exists():
        files[_DEFAULT] = file
    return sources | {name: _read_template(file) for name, file in files.items()}


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as a chat template ({type(error).__name__})") from error


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
