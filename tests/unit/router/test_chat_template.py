from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from router.chat_template import ChatTemplate, load_chat_template
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
    assert ours.render(MESSAGES) == expected


def test_a_template_file_goes_before_the_tokenizer_config(tmp_path: Path) -> None:
    save(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "file"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = load_chat_template(save(tmp_path, chat_template=named))
    assert template is not None
    assert template.render(MESSAGES) == "plain"


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
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses them: roles must alternate"),
        ("{{ raise_exception('cannot render ' + messages[0]['content']) }}", "refuses them"),
    ],
)
def test_a_refusal_repeats_the_templates_words_but_no_message(source: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(source, {}).render([{"role": "user", "content": "a prompt"}])

    assert refused.value.message.endswith(said)


def test_a_broken_template_is_found_at_start() -> None:
    with pytest.raises(CheckpointError, match="line 1"):
        ChatTemplate("{% if %}", {})
