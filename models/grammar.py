"""What a constraint allows, as a grammar over the model's tokens, by llguidance.

    Constraint ─▶ GrammarCompiler.compile ─▶ LLMatcher at its start, which can write something

The same at the router, which refuses what cannot be compiled (`router.grammar_check`), and at workers, which draw by it
(`engine.guides`). The limits bound what one grammar and one step of it may cost; time is bounded by whoever calls.
Knows no requests. Errors leave out the words of a constraint: they are logged in many places.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from models.files.checkpoint import CheckpointInfo
from models.files.read_files import ReadFiles
from models.files.tokenizer_file import read_tokenizer
from tandem.errors import CheckpointError, InvalidRequest
from tandem.types import Constraint, Language, TokenId

_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""A fifth of the library's own or less: a compile then takes well under a second, unless it was made to last."""
_JSON_WHITE_SPACE = r"[ \t\r\n]{1,32}"
"""White space that any printer of JSON writes, but bounded: small models would go on with it until max_tokens."""
_MAX_MESSAGE = 200
_WORD = re.compile(r"\w{4,}")
_KEYWORDS = frozenset(
    (
        "additionalProperties allOf anyOf const contains dependentRequired else enum exclusiveMaximum exclusiveMinimum "
        "format items maxItems maxLength maxProperties maximum minItems minLength minProperties minimum multipleOf "
        "oneOf pattern patternProperties prefixItems properties propertyNames required schema start then type "
        "unevaluatedItems unevaluatedProperties uniqueItems"
    ).split()
)
"""Words that an error may repeat though the text has them too."""


class GrammarCompiler:
    """For one model's tokens. Reads its tokenizer at the first use; any thread may call it."""

    def __init__(
        self, path: Path, vocab_size: int, eos_token_ids: Iterable[TokenId], files: ReadFiles | None = None
    ) -> None:
        """`path`: of the tokenizer. `vocab_size`: of the logits; ids that the tokenizer lacks are not allowed.

        `files`: those that must be as they were when the tokenizer is read.
        """
        self._folder = path
        self._files = files or ReadFiles()
        self._vocab_size = vocab_size
        self._num_tokens = vocab_size
        """At least as many as the tokenizer has, once that is read."""
        self._eos_token_ids: list[int] = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._loading = Lock()

    @classmethod
    def of(cls, checkpoint: CheckpointInfo) -> GrammarCompiler:
        """Returns a checkpoint's compiler."""
        return cls(checkpoint.texts, checkpoint.vocab_size, checkpoint.eos_token_ids, checkpoint.read)

    @property
    def num_mask_words(self) -> int:
        """Words of 32 bits in a token mask."""
        return -(-self._vocab_size // 32)

    @property
    def num_library_words(self) -> int:
        """The same in the library's masks, once a grammar was compiled: there may be tokens that the logits lack."""
        return -(-self._num_tokens // 32)

    def compile(self, constraint: Constraint) -> LLMatcher:
        """At its start. Raises InvalidRequest that names the field, CheckpointError."""
        field = f"sampling.{constraint.language}"
        matcher = LLMatcher(self.tokenizer(), _grammar(constraint, field), log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")  # most of a large one's work is done here
            if not allowed & ((1 << self._vocab_size) - 1) or matcher.get_error().startswith("NoExtension"):
                raise InvalidRequest(field, "allows no text that this model could write")
        if matcher.is_error():
            raise InvalidRequest(field, _said(matcher.get_error(), constraint.texts))
        return matcher

    def tokenizer(self) -> LLTokenizer:
        """Reads it if that has not been done: up to seconds for a large vocabulary. Raises CheckpointError."""
        with self._loading:
            if self._tokenizer is None:
                try:
                    read = read_tokenizer(self._folder)
                    self._files.check()
                    # Gemma 3's tokenizers have one that its smallest models lack, which take no images.
                    self._num_tokens = max(self._vocab_size, 1 + max(read.get_vocab().values(), default=0))
                    eos = self._eos_token_ids
                    self._tokenizer = LLTokenizer(read.to_str(), n_vocab=self._num_tokens, eos_token=eos)
                except ValueError as error:
                    raise CheckpointError(f"{self._folder}: no grammar can use it ({type(error).__name__})") from error
            return self._tokenizer


def _grammar(constraint: Constraint, field: str) -> str:
    """In llguidance's own form."""
    text = constraint.texts[0]
    match constraint.language:
        case Language.JSON_SCHEMA:
            return _json_grammar(text, field)
        case Language.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case Language.GRAMMAR:
            return LLMatcher.grammar_from_lark(text)
        case Language.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(f"(?:{re.escape(each)})" for each in constraint.texts))


def _json_grammar(text: str, field: str) -> str:
    def refuse(_: str) -> NoReturn:
        raise ValueError

    try:
        schema = json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise InvalidRequest(field, "is nested too deeply") from error
    except ValueError as error:
        position = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidRequest(field, f"is not JSON{position}") from None  # the cause holds the text
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "must be an object that allows something")
    try:
        # Not the caller's own text: the library pastes what it is given into a larger document.
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema), None if _is_compact(schema) else {"whitespace_pattern": _JSON_WHITE_SPACE}
        )
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, _said(str(error), [text])) from None


def _is_compact(schema: Mapping[str, object]) -> bool:
    """Whether it wants no white space, over which a pattern of ours would win."""
    own = schema.get("x-guidance")
    return isinstance(own, dict) and own.get("whitespace_flexible") is False


def _said(message: str, texts: Collection[str]) -> str:
    """What an error of the library says, without words of the caller's."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["is not valid"]
    reason = next((line for line in reversed(lines) if line.startswith("error:")), lines[0])
    theirs = {word for text in texts for word in _WORD.findall(text)} - _KEYWORDS
    return _WORD.sub(lambda word: "…" if word[0] in theirs else word[0], reason)[:_MAX_MESSAGE]
