"""The tokenizer and the chat template that a GGUF file carries, as tokenizer.json and tokenizer_config.json have them.

    gpt2    bytes as characters, merges in their order, text cut before by `tokenizer.ggml.pre`
    llama   SentencePiece's BPE: pairs whose token has the highest score merge first; bytes where no token fits

Another kind, and a cut that is not known, are refused by name. Source of the cuts: llama.cpp, src/llama-vocab.cpp, and
the tokenizer.json of the models that they were made for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from models.files.gguf import Gguf
from tandem.errors import CheckpointError

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_BEHIND = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS, _OTHERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|", r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class _Cut:
    """What happens to a text before merges."""

    patterns: tuple[str, ...]
    """Each cuts the pieces of the one before: around each match."""
    is_llama3: bool = False
    """Whether a piece that is a token is taken whole, and texts begin with the bos token unless the file says no."""
    composes: bool = False
    """Whether characters are composed first (NFC)."""


_LLAMA3 = _Cut((rf"{_ENDS}{_LETTERS}\p{{N}}{{1,3}}{_OTHERS}{_BEHIND}",), is_llama3=True)
_QWEN2 = _Cut((rf"{_ENDS}{_LETTERS}\p{{N}}{_OTHERS}{_BEHIND}",), composes=True)
_CUTS: Mapping[str, _Cut] = {
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Cut((_WORDS,)),
    "smollm": _Cut((r"\p{N}", _WORDS)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    "smaug-bpe": _Cut(_LLAMA3.patterns),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _Cut(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_BEHIND}",
        ),
        is_llama3=True,
    ),
}
"""By `tokenizer.ggml.pre`."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Of `tokenizer.ggml.token_type`; 5 is an unused token, 6 a byte."""
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names in tokenizer_config.json, and what GGUF calls them."""
_SPACE = "▁"
_REMEDY = "put the tokenizer.json of the model that the file was made from beside it"


def gguf_tokenizer(gguf: Gguf) -> Tokenizer:
    """Builds the tokenizer. Raises CheckpointError naming the key."""
    tokens, kind = gguf_tokens(gguf), gguf.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise _error(gguf, "model", f"{kind!r} is not read (gpt2, llama)")
    types = gguf.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    cut = _cut(gguf) if kind == "gpt2" else None
    try:
        tokenizer = _sentencepiece(gguf, vocab, types) if cut is None else _byte_level(gguf, vocab, cut)
        added = [
            AddedToken(token, special=its_type != _USER_DEFINED, normalized=False)
            for token, its_type in zip(tokens, types, strict=True)
            if its_type in {_UNKNOWN, _CONTROL, _USER_DEFINED}
        ]
        tokenizer.add_tokens(added)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise _error(gguf, "tokens", f"make no tokenizer: {error}") from error
    adds_bos = gguf.metadata.get("tokenizer.ggml.add_bos_token", cut is None or cut.is_llama3)
    adds_eos = gguf.metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [token for token in [_special(gguf, "bos")] if token is not None and adds_bos]
    after = [token for token in [_special(gguf, "eos")] if token is not None and adds_eos]
    if before or after:
        known = [(token, vocab[token]) for token in (*before, *after)]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=known)
    return tokenizer


def gguf_tokens(gguf: Gguf) -> Sequence[str]:
    """Returns the tokens by id. Raises CheckpointError if the file has none."""
    tokens: Sequence[str] | None = gguf.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise _error(gguf, "tokens", "is missing")
    return tokens


def gguf_settings(gguf: Gguf) -> dict[str, Any]:
    """What tokenizer_config.json would say: special tokens, chat templates. Raises CheckpointError naming the key."""
    found = {name: _special(gguf, theirs) for name, theirs in _SPECIAL_TOKENS.items()}
    settings: dict[str, Any] = {name: token for name, token in found.items() if token is not None}
    templates = {"default": gguf.metadata.get("tokenizer.chat_template")}
    for name in gguf.metadata.get("tokenizer.chat_templates", ()):
        templates[name] = gguf.metadata.get(f"tokenizer.chat_template.{name}")
    known = [{"name": name, "template": text} for name, text in templates.items() if text is not None]
    return settings | ({"chat_template": known} if known else {})


def _cut(gguf: Gguf) -> _Cut:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if name not in _CUTS:
        raise _error(gguf, "pre", f"{name!r} is not known ({', '.join(_CUTS)})")
    return _CUTS[name]


def _byte_level(gguf: Gguf, vocab: dict[str, int], cut: _Cut) -> Tokenizer:
    merges = [tuple(each.split(" ", 1)) for each in gguf.metadata.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=cut.is_llama3))
    if cut.composes:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, characters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: Gguf, vocab: dict[str, int], types: Sequence[int]) -> Tokenizer:
    unknown = next((token for token, its_type in zip(vocab, types, strict=True) if its_type == _UNKNOWN), None)
    merges = [pair for _, _, pair in sorted(_merges(gguf, vocab, types), reverse=True)]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = gguf.metadata.get("tokenizer.ggml.add_space_prefix", True)
    before, after = ([normalizers.Prepend(_SPACE)], [decoders.Strip(" ", 1, 0)]) if has_prefix else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    texts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    tokenizer.decoder = decoders.Sequence(texts)
    return tokenizer


def _merges(gguf: Gguf, vocab: Mapping[str, int], types: Sequence[int]) -> Iterator[tuple[float, int, tuple[str, str]]]:
    """Yields each way to make a token of two: its score, the length of the first part, both parts."""
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise _error(gguf, "scores", "is missing")
    for token, score, its_type in zip(vocab, scores, types, strict=True):
        for at in range(1, len(token)) if its_type in {_NORMAL, _USER_DEFINED} else ():
            parts = token[:at], token[at:]
            if parts[0] in vocab and parts[1] in vocab:
                yield score, at, parts


def _special(gguf: Gguf, name: str) -> str | None:
    """The text of the special token `name`; None if the file names none."""
    key, tokens = f"{name}_token_id", gguf_tokens(gguf)
    index = gguf.metadata.get(f"tokenizer.ggml.{key}")
    if index is not None and not 0 <= index < len(tokens):
        raise _error(gguf, key, f"is {index}, and there are {len(tokens)} tokens")
    return None if index is None else tokens[index]


def _error(gguf: Gguf, key: str, problem: str) -> CheckpointError:
    return gguf.error(f"tokenizer.ggml.{key}", f"{problem}: {_REMEDY}")
