"""Which texts a constraint allows over the demo's tokens, and how a bad one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.files.checkpoint import read_checkpoint
from models.grammar import GrammarCompiler
from tandem.errors import CheckpointError, InvalidRequest
from tandem.types import Constraint, Language, TokenId

DEMO = read_checkpoint("demo")
(EOS,) = DEMO.eos_token_ids


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.of(DEMO)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO.path / "tokenizer.json"))


def constraint(language: Language, *texts: str) -> Constraint:
    return Constraint(language, texts)


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        (constraint(Language.REGEX, "ab?"), ["a", "ab"], ["abb", "b", ""]),
        (constraint(Language.REGEX, "a/ | /b\n"), ["a/ ", " /b\n"], ["a", "/b"]),
        (constraint(Language.REGEX, ""), [""], ["a"]),
        (constraint(Language.GRAMMAR, 'start: "x" start "y" | ""'), ["", "xy", "xxyy"], ["x", "xyy"]),
        (constraint(Language.CHOICE, "a b", "x|y", '("é"', ""), ["a b", "x|y", '("é"', ""], ["x", "y", "a"]),
        (constraint(Language.JSON_SCHEMA, "{}"), ["1", '{"a": [true, null]}', '"x"'], ["{", "a"]),
        (constraint(Language.JSON_SCHEMA, "true"), ["1"], ["{"]),
        (constraint(Language.JSON_SCHEMA, '{"type": "object"}'), ["{}"], ["1"]),
        (constraint(Language.JSON_SCHEMA, "{}"), ["[" + 32 * " " + "]"], ["[" + 33 * " " + "]"]),
        (constraint(Language.JSON_SCHEMA, '{"const": "a b"}'), ['"a b"'], ['"a"']),
        (
            constraint(Language.JSON_SCHEMA, '{"type": "object", "x-guidance": {"whitespace_flexible": false}}'),
            ['{"a":1}'],
            ['{"a": 1}'],
        ),
    ],
    ids=repr,
)
def test_a_constraint_allows_what_it_says(
    compiler: GrammarCompiler, tokenizer: Tokenizer, given: Constraint, good: list[str], bad: list[str]
) -> None:
    matcher = compiler.compile(given)

    def allows(text: str) -> bool:
        token_ids = [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]
        return matcher.deep_copy().validate_tokens(token_ids) == len(token_ids)

    assert [text for text in good if not allows(text)] == []
    assert [text for text in bad if allows(text)] == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (constraint(Language.JSON_SCHEMA, ""), "is not JSON at character 0"),
        (constraint(Language.JSON_SCHEMA, '{} }], "max_tokens": 1, "x": [{}'), "is not JSON at character 3"),
        (constraint(Language.JSON_SCHEMA, '{"const": NaN}'), "is not JSON"),
        (constraint(Language.JSON_SCHEMA, "1" * 5000), "is not JSON"),
        (constraint(Language.JSON_SCHEMA, "[" * 60_000), "nested too deeply"),
        (constraint(Language.JSON_SCHEMA, '{"items":' * 300 + "{}" + "}" * 300), "recursion limit"),
        (constraint(Language.JSON_SCHEMA, "false"), "must be an object"),
        (constraint(Language.JSON_SCHEMA, "[1]"), "must be an object"),
        (constraint(Language.JSON_SCHEMA, '{"not": {}}'), "sampling.json_schema"),
        (constraint(Language.JSON_SCHEMA, '{"$ref": "file:///etc/passwd"}'), "Resource"),
        (constraint(Language.JSON_SCHEMA, '{"oneOf": [{"minLength": 1}, {"maxLength": 9}]}'), "oneOf"),
        (constraint(Language.JSON_SCHEMA, '{"$ref": "#"}'), "allows no text"),
        (constraint(Language.REGEX, "(a"), "unclosed group"),
        (constraint(Language.REGEX, "(a)\\1"), "backreferences"),
        (constraint(Language.REGEX, "[^\\x00-\\x{10FFFF}]"), "allows no text"),
        (constraint(Language.REGEX, "(" * 30_000 + ")" * 30_000), "sampling.regex"),
        (constraint(Language.GRAMMAR, "start: A"), "sampling.grammar"),
        (constraint(Language.GRAMMAR, "start: " + "(" * 30_000 + '"a"' + ")" * 30_000), "too deeply nested"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_bad_constraint_is_refused_by_its_field(compiler: GrammarCompiler, given: Constraint, why: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(given)

    assert refused.value.field == f"sampling.{given.language}"
    assert why in refused.value.message
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    "given",
    [
        constraint(Language.JSON_SCHEMA, '{"type": "xyzzy"}'),
        constraint(Language.JSON_SCHEMA, json.dumps({"$ref": "http://xyzzy/plugh"})),
        constraint(Language.REGEX, "(xyzzy\\p{plugh}"),
        constraint(Language.GRAMMAR, 'start: xyzzy "plugh"'),
    ],
    ids=repr,
)
def test_a_refusal_repeats_no_words_of_the_caller(
    compiler: GrammarCompiler, given: Constraint, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(given)

    said = str(refused.value) + "".join(capfd.readouterr())
    assert "xyzzy" not in said
    assert "plugh" not in said


def test_ids_beyond_the_tokenizers_are_never_allowed() -> None:
    wide = GrammarCompiler(DEMO.path, DEMO.vocab_size + 70, DEMO.eos_token_ids)

    allowed = int.from_bytes(wide.compile(constraint(Language.REGEX, "(?s:.*)")).compute_bitmask(), "little")

    assert wide.num_mask_words == -(-(DEMO.vocab_size + 70) // 32)
    assert allowed >> EOS & 1
    assert allowed >> DEMO.vocab_size == 0


@pytest.mark.parametrize("num_lacking", [1, 40])
def test_a_tokenizer_may_have_tokens_that_the_model_lacks(num_lacking: int) -> None:
    narrow = GrammarCompiler(DEMO.path, DEMO.vocab_size - num_lacking, DEMO.eos_token_ids)

    matcher = narrow.compile(constraint(Language.REGEX, "a"))

    assert narrow.num_library_words == -(-DEMO.vocab_size // 32)
    assert len(matcher.compute_bitmask()) // 4 >= narrow.num_mask_words


def test_a_constraint_that_only_tokens_which_the_model_lacks_could_write_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="allows no text"):
        GrammarCompiler(DEMO.path, 3, [TokenId(1)]).compile(constraint(Language.REGEX, "a"))


def test_a_tokenizer_that_was_replaced_before_its_first_use_makes_no_mask(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO.texts, tmp_path / "model")
    compiler = GrammarCompiler.of(read_checkpoint(str(folder)))
    shutil.copy(folder / "tokenizer.json", tmp_path / "other")
    (tmp_path / "other").replace(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        compiler.compile(constraint(Language.REGEX, "a"))
