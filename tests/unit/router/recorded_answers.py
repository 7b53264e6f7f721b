"""Answers as models write them, with the parts that they are, and chat templates cut down to the marks in them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from router.faces.parsers.formats import AnswerFormat, detect_format
from router.faces.parsers.parts import AnswerParser, CallArguments, CallBegan, Part, Reasoning, Text, Tools

TOOLS: Tools = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "note": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array"},
            "where": {"$ref": "#/$defs/Place"},
            "loud": {"type": ["boolean", "null"]},
            "rate": {"type": "number"},
        },
    },
}
PYTHON_TAG, EOT = "<|python_tag|>", "<|eot_id|>"
TEMPLATES = {
    "hermes": """{{ '<tool_call>\\n{"name": "' }}{{ '", "arguments": ' }}{{ '</tool_call>' }}
        {% if '</think>' in content %}{{ '<think>\\n' }}{% endif %}""",
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + name + '>\\n' }}{{ '<parameter=' + key + '>\\n' }}<think>",
    "glm45": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{{ '<think></think>' }}",
    "llama3": """{{ '<|python_tag|>' }}{{ '{"name": "' + name + '", ' }}{{ '"parameters": ' }}""",
    "mistral": "{{ '[TOOL_CALLS]' }}{{ '[ARGS]' }}{{ '[THINK]' + text + '[/THINK]' }}",
    "deepseek_v3": """{{ content.split('</think>')[-1] }}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type +
        '<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n' }}""",
    "deepseek_v31": "{{ '<｜Assistant｜><think>' }}{{ '<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' }}",
    "gpt_oss": "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}{{ '<|end|>' }}",
    "plain": "{{ '<|user|>' }}{{ content }}{{ '<|assistant|>' }}",
}


def format_of(name: str) -> AnswerFormat:
    return detect_format(TEMPLATES[name], {PYTHON_TAG, EOT})


def joined(parts: Iterable[Part]) -> list[Part]:
    """Parts with neighbours of one kind made one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Text | Reasoning | CallArguments) and type(last) is type(part):
            found[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            found.append(part)
    return found


def parse(parser: AnswerParser, pieces: Iterable[str]) -> list[Part]:
    return joined([*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()])


def call(name: str, arguments: str) -> list[Part]:
    json.loads(arguments)
    return [CallBegan(name), CallArguments(arguments)]


@dataclass(frozen=True)
class Recording:
    format: str
    text: str
    parts: list[Part]
    prompt_end: str = ""


OSLO = '{"city": "Oslo", "days": 2}'
TRICKY = '{"text": "a } \\" ] { \\\\", "where": {"a": [{"b": "\\u00e9 </tool_call>"}]}}'
RECORDINGS = {
    "hermes, thought, text and two calls": Recording(
        "hermes",
        "<think>\nThey ask for <tool_call>.\n</think>\n\nI look.\n\n"
        f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "note", "arguments": {TRICKY}}}\n</tool_call>',
        [
            Reasoning("\nThey ask for <tool_call>.\n"),
            Text("I look."),
            *call("weather", OSLO),
            *call("note", TRICKY),
        ],
    ),
    "hermes, inside reasoning from the first token": Recording(
        "hermes",
        "Easy.\n</think>\n\nFour.",
        [Reasoning("Easy.\n"), Text("Four.")],
        "<|im_start|>assistant\n<think>\n",
    ),
    "hermes, reasoning switched off by the prompt": Recording(
        "hermes", "    Four.", [Text("    Four.")], "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "hermes, arguments before the name, and none": Recording(
        "hermes",
        f'<tool_call>{{"arguments": {OSLO}, "name": "weather"}}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call> Done.',
        [*call("weather", OSLO), *call("now", "{}"), Text("Done.")],
    ),
    "qwen3_coder, two calls": Recording(
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=note>\n"
        "<parameter=text>\n\n  7\n\n</parameter>\n"
        '<parameter=tags>\n["a", 1.50]\n</parameter>\n<parameter=loud>\nTrue\n</parameter>\n</function>\n</tool_call>',
        [
            Text("I look."),
            *call("weather", OSLO),
            *call("note", '{"text": "\\n  7\\n", "tags": ["a", 1.50], "loud": true}'),
        ],
    ),
    "qwen3_coder, opening mark left out": Recording(
        "qwen3_coder",
        "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        call("weather", '{"city": "Oslo"}'),
    ),
    "llama3, two tagged calls": Recording(
        "llama3",
        f'<|python_tag|>{{"name": "weather", "parameters": {OSLO}}}; {{"name": "now", "parameters": {{}}}}',
        [*call("weather", OSLO), *call("now", "{}")],
    ),
    "llama3, bare call": Recording(
        "llama3",
        f'{{"type": "function", "name": "weather", "parameters": {OSLO}}}',
        call("weather", OSLO),
    ),
    "llama3, an answer in JSON": Recording("llama3", '{"name": "Bob", "age": 5}', [Text('{"name": "Bob", "age": 5}')]),
    "llama3, code": Recording("llama3", "<|python_tag|>print(1)", [Text("<|python_tag|>print(1)")]),
    "mistral, array": Recording(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}, "id": "VvvODy9mT"}}, '
        f'{{"name": "note", "arguments": {TRICKY}}}]',
        [*call("weather", OSLO), *call("note", TRICKY)],
    ),
    "mistral, thought, text and names without quotes": Recording(
        "mistral",
        f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]note{TRICKY}"
        f"[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{{}}",
        [
            Reasoning("Hm."),
            Text("I look."),
            *call("weather", OSLO),
            *call("note", TRICKY),
            *call("now", "{}"),
        ],
    ),
    "deepseek_v3, thought and two calls": Recording(
        "deepseek_v3",
        "Hm.\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{OSLO}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n{TRICKY}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Reasoning("Hm.\n"), Text("I look."), *call("weather", OSLO), *call("note", TRICKY)],
        "<｜Assistant｜><think>\n",
    ),
    "deepseek_v31, two calls": Recording(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*call("weather", OSLO), *call("now", "{}")],
        "<｜Assistant｜></think>",
    ),
    "glm45, thought, text and two calls": Recording(
        "glm45",
        "\n<think>Hm.</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [Reasoning("Hm."), Text("I look."), *call("weather", OSLO), *call("now", "{}")],
    ),
    "glm45, values of all types": Recording(
        "glm45",
        "<tool_call>note<arg_key>text</arg_key><arg_value>5</arg_value><arg_key>maybe</arg_key><arg_value>null</arg_value>"
        "<arg_key>where</arg_key><arg_value>{'x'}</arg_value><arg_key>rate</arg_key><arg_value>NaN</arg_value>"
        '<arg_key>tags</arg_key><arg_value>[ {"é": "</tool_call>"} ]</arg_value></tool_call>',
        call(
            "note",
            """{"text": "5", "maybe": null, "where": "{'x'}", "rate": "NaN", "tags": [ {"é": "</tool_call>"} ]}""",
        ),
    ),
    "glm45, a tool that nobody offered": Recording(
        "glm45",
        "<tool_call>odd<arg_key>a</arg_key><arg_value>Oslo</arg_value><arg_key>b</arg_key><arg_value>[1]</arg_value></tool_call>",
        call("odd", '{"a": "Oslo", "b": [1]}'),
    ),
    "gpt_oss, thought, preamble and call": Recording(
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO}<|call|>",
        [Reasoning("Hm.\n"), Text("I look."), *call("weather", OSLO)],
        "<|start|>assistant",
    ),
    "gpt_oss, thought and answer": Recording(
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|> Four.\n<|return|>",
        [Reasoning("Hm."), Text(" Four.\n")],
    ),
    "gpt_oss, tool named before the channel, and another right behind": Recording(
        "gpt_oss",
        f" to=functions.weather<|channel|>commentary json<|message|>{OSLO}<|call|>"
        f"<|start|>assistant<|channel|>analysis to=python code<|message|>{{}}",
        [*call("weather", OSLO), *call("python", "{}")],
        "<|start|>assistant",
    ),
    "gpt_oss, channel opened by the prompt": Recording(
        "gpt_oss", "Four.", [Text("Four.")], "<|end|><|start|>assistant<|channel|>final<|message|>"
    ),
    "gpt_oss, no header at all": Recording("gpt_oss", "Four.", [Text("Four.")], "<|start|>assistant"),
    "plain": Recording("plain", " <think>a</think>\n<tool_call>", [Text(" <think>a</think>\n<tool_call>")]),
}
