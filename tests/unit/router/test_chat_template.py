from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from router.chat_template import ChatTemplate, Conversation, load_chat_template, num_bytes, read_conversation
from router.request import ChatPrompt
from tandem.errors import CheckpointError, InvalidRequest

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": 'Say "é" \n twice'},
    {"role": "assistant", "content": "éé"},
    {"role": "user", "content": "Thanks"},
]
TEMPLATES = {
    "chatml": """{% for message in messages %}
    <|im_start|>{{ message['role'] }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "specials": "{{ bos_token }}{% for m in messages %}[{{ loop.index }}]{{ m.content }}{{ eos_token }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "optional": "{% if tools %}T{% endif %}{% if documents is defined and documents %}D{% endif %}"
    "{{ unknown | default('-') }}{{ strftime_now('%Y') }}",
}


def save(path: Path, **config: object) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(byte_tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer, bos_token="<s>", eos_token="<eos>")
    theirs.chat_template = TEMPLATES[name]
    ours = load_chat_template(
        save(tmp_path, chat_template=TEMPLATES[name], bos_token={"content": "<s>"}, eos_token="<eos>")
    )
    assert ours is not None
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.render(Conversation(MESSAGES)) == expected


def test_a_template_file_goes_before_the_tokenizer_config(tmp_path: Path) -> None:
    save(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(Conversation(MESSAGES)) == "file"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = load_chat_template(save(tmp_path, chat_template=named))
    assert template is not None
    assert template.render(Conversation(MESSAGES)) == "plain"


def test_a_checkpoint_may_have_no_template(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_what_a_template_refuses_or_breaks_on_is_the_messages_fault(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"chat\.messages"):
        ChatTemplate(source, {}).render(Conversation(MESSAGES))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses them: roles must alternate"),
        ("{{ raise_exception('cannot render ' + messages[0]['content']) }}", "refuses them"),
    ],
)
def test_a_refusal_repeats_the_templates_words_but_no_message(source: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(source, {}).render(Conversation([{"role": "user", "content": "a prompt"}]))

    assert refused.value.message.endswith(said)


def test_a_broken_template_is_found_at_start() -> None:
    with pytest.raises(CheckpointError, match="line 1"):
        ChatTemplate("{% if %}", {})


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"unit": "C", "city": "Oslo"}}}
TOOL_TEMPLATE = """{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}:
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{%- if m.tool_call_id %} of {{ m.tool_call_id }}{% endif %}
{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
TOOL_MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Oslo?"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
]


def sent() -> list[dict[str, object]]:
    """As a face gives it: arguments are JSON."""
    function = {"name": "weather", "arguments": json.dumps(CALL["function"]["arguments"])}  # type: ignore[index]
    return [
        each | ({"tool_calls": [CALL | {"function": function}]} if "tool_calls" in each else {})
        for each in TOOL_MESSAGES
    ]


def test_tools_calls_results_parts_and_variables_are_rendered_as_by_transformers(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer)
    theirs.chat_template = TOOL_TEMPLATE
    ours = load_chat_template(save(tmp_path, chat_template=TOOL_TEMPLATE))
    assert ours is not None
    prompt = ChatPrompt(sent(), (json.dumps(TOOL),), {"enable_thinking": "false"})
    expected = theirs.apply_chat_template(
        TOOL_MESSAGES, tools=[TOOL], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert ours.render(read_conversation(prompt)) == expected
    assert num_bytes(prompt) > len(json.dumps(TOOL))


def test_a_template_that_takes_content_for_text_gets_parts_joined() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m['content'] }}]{% endfor %}", {})
    assert template.render(Conversation(TOOL_MESSAGES[:1])) == "[Weather\nin Oslo?]"


@pytest.mark.parametrize("loop", ["m.content", "m['content']", 'm["content"]', "content"])
def test_a_template_that_loops_over_parts_gets_them(loop: str) -> None:
    source = (
        "{% for m in messages %}{% set content = m.content %}{% for part in " + loop + " %}<{{ part.text }}>"
        "{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(Conversation(TOOL_MESSAGES[:1])) == "<Weather><in Oslo?>"


def test_with_tools_the_template_for_tools_is_taken_and_any_by_name(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = load_chat_template(save(tmp_path, chat_template="plain"))
    assert template is not None
    assert template.render(Conversation(MESSAGES)) == "plain"
    assert template.render(Conversation(MESSAGES, [TOOL])) == "tools"
    assert template.render(Conversation(MESSAGES, [TOOL], template_name="default")) == "plain"
    with pytest.raises(InvalidRequest, match="default, tool_use"):
        template.render(Conversation(MESSAGES, template_name="rag"))


def test_a_file_takes_the_place_of_the_checkpoint_s_templates(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own {{ eos_token }}")
    template = load_chat_template(save(tmp_path, chat_template="plain", eos_token="<eos>"), file)
    assert template is not None
    assert template.render(Conversation(MESSAGES)) == "own <eos>"
    with pytest.raises(CheckpointError, match=r"nowhere\.jinja"):
        load_chat_template(tmp_path, tmp_path / "nowhere.jinja")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (ChatPrompt(MESSAGES, ("[]",)), "chat.tools[0]"),
        (ChatPrompt(MESSAGES, ("{",)), "chat.tools[0]"),
        (ChatPrompt(MESSAGES, (), {"enable_thinking": "no"}), "chat.template_variables[enable_thinking]"),
        (ChatPrompt(MESSAGES, (), {"messages": "[]"}), "chat.template_variables"),
        (
            ChatPrompt([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]),
            "chat.messages[0].tool_calls[0].arguments",
        ),
    ],
)
def test_json_that_is_none_is_refused_by_field(prompt: ChatPrompt, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_conversation(prompt)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for m in messages %}{{ 'call' if m['content'] is none else m['content'] }},{% endfor %}", "a,call,"),
        ("{% for m in messages %}[{{ m.content }}]{% if '</think>' in m.content %}{% endif %}{% endfor %}", "[a][]"),
    ],
    ids=["asks for none", "takes text"],
)
def test_a_turn_of_calls_alone_has_no_content_for_templates_that_ask_for_that(source: str, shown: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ChatTemplate(source, {}).render(Conversation(turns)) == shown
