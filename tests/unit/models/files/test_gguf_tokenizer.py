"""A GGUF file's own tokenizer gives the ids of the one that the file was written from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from models.files.checkpoint import resolve_model
from models.files.gguf import read_gguf
from models.files.gguf_tokenizer import gguf_settings
from models.files.tokenizer_file import find_tokens, read_tokenizer
from tandem.errors import CheckpointError
from tests.gguf_files import BYTES, container, tokenizer_metadata

WORDS = (Path(__file__).parents[4] / "docs" / "operations.md").read_text()
CHARACTERS = "aAzZéßñЖ東京 ,.'!?-_\t\r\n\n  0129½٣$+<=>^~|#`{}()[]🙂ǅ\u0301\u00a0\u3000İ"
TEXTS = [
    "",
    "Once upon a time",
    " two  spaces,   and three",
    "It's DON'T we'll THEY'LL 's 're I'm",
    "12345 67 3.14159 2,000.5 % a1 1a ½ ٣٤",
    "if (a != b) {\r\n\treturn 'x';  \n\n\n}  \n",
    "naïve façade — 東京 Ελλάδα привет नमस्ते 🙂🙂",
    "cafe\u0301 e\u0301\u0302 ﬁ Å",
    "<|begin|>system<|end|><|begin|> <|end|>\n<think>hm</think>",
    "<s>[INST] x </s><unk> <0x41>",
    "HTTPServer getURLFor iPhone ǅungla",
]


def texts() -> list[str]:
    rng = random.Random(0)
    words = WORDS.split(" ")
    mixed = ["".join(rng.choices(CHARACTERS, k=rng.randint(1, 40))) for _ in range(200)]
    return [*TEXTS, *mixed, *(" ".join(rng.choices(words, k=20)) for _ in range(50))]


def ids(tokenizer: Tokenizer, *, special: bool = True) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(texts(), add_special_tokens=special)]


def written(tmp_path: Path, tokenizer: Tokenizer, kind: str, **more: Any) -> Path:
    file = tmp_path / "own.gguf"
    file.write_bytes(container(tokenizer_metadata(tokenizer, kind, **more), {}))
    return file


def byte_level(before: list[Any], *, whole: bool = False, composes: bool = False) -> Tokenizer:
    """Trained on a text; `before` cuts it, as in the tokenizer.json of a family."""
    tokenizer = Tokenizer(BPE(ignore_merges=whole))
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([WORDS], trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def split(pattern: str) -> list[Any]:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


GPT2 = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
LLAMA3 = split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMOLLM = [pre_tokenizers.Digits(individual_digits=True), *GPT2]


@pytest.mark.parametrize(
    ("pre", "tokenizer"),
    [
        ("gpt-2", byte_level(GPT2)),
        ("llama-bpe", byte_level(LLAMA3, whole=True)),
        ("qwen2", byte_level(QWEN2, composes=True)),
        ("tekken", byte_level(TEKKEN, whole=True)),
        ("smollm", byte_level(SMOLLM)),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_tokenizer_of_bytes_gives_the_same_ids_and_texts(pre: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    ours = read_tokenizer(written(tmp_path, tokenizer, "gpt2", pre=pre))
    assert ours.get_vocab() == tokenizer.get_vocab()
    encoded = ids(tokenizer)
    assert ids(ours) == encoded
    for skip in (False, True):
        wanted = tokenizer.decode_batch(encoded, skip_special_tokens=skip)
        assert ours.decode_batch(encoded, skip_special_tokens=skip) == wanted


def test_the_demo_models_tokenizer_goes_through_a_file(tmp_path: Path) -> None:
    demo = read_tokenizer(resolve_model("demo"))
    ours = read_tokenizer(written(tmp_path, demo, "gpt2", pre="gpt-2"))
    assert ids(ours) == ids(demo)


def test_without_the_name_of_a_cut_the_format_has_a_default(tmp_path: Path) -> None:
    ours = read_tokenizer(written(tmp_path, byte_level(GPT2), "gpt2"))
    pieces = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("it's $12345 (x+y)~z")]
    assert pieces == ["it", "'", "s", "Ġ", "$", "123", "45", "Ġ", "(", "x", "+", "y", ")~", "z"]


def sentencepiece(*, prefix: bool = True) -> tuple[Tokenizer, list[float]]:
    """As Llama 2's, and the score of each token: the earlier it was merged, the higher."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=["<unk>", "<s>", "</s>", *sorted(BYTES)])
    tokenizer.train_from_iterator([line for line in WORDS.split("\n") if line], trainer)
    scores = [-float(index) for index in range(tokenizer.get_vocab_size())]
    plain = Tokenizer(BPE(tokenizer.get_vocab(), [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    plain.add_special_tokens(["<unk>", "<s>", "</s>"])
    plain.normalizer = tokenizer.normalizer
    return plain, scores


def merged(text: str, vocab: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE as its paper has it: the best pair first, the leftmost of equal ones, until none is left."""
    symbols = list(text)
    while True:
        pairs = [symbols[at] + symbols[at + 1] for at in range(len(symbols) - 1)]
        found = [(-scores[vocab[pair]], at) for at, pair in enumerate(pairs) if pair in vocab]
        if not found:
            break
        at = min(found)[1]
        symbols[at : at + 2] = [pairs[at]]
    return [
        token_id
        for symbol in symbols
        for token_id in ([vocab[symbol]] if symbol in vocab else [vocab[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_by_scores_merges_as_sentencepiece_does(prefix: bool, tmp_path: Path) -> None:
    source, scores = sentencepiece(prefix=prefix)
    file = written(tmp_path, source, "llama", scores=scores, bos_token_id=1, eos_token_id=2, add_space_prefix=prefix)
    ours, vocab = read_tokenizer(file), source.get_vocab()
    plain = [text for text in texts() if "<" not in text]
    for text, encoding in zip(plain, ours.encode_batch(plain), strict=True):
        spaced = f"▁{text}" if prefix and text else text
        assert encoding.ids == [1, *merged(spaced.replace(" ", "▁"), vocab, scores)]
        assert ours.decode(encoding.ids) == text
    assert ours.encode("<s>a</s>", add_special_tokens=False).ids[::2] == [1, 2]


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    tokenizer = byte_level(LLAMA3, whole=True)
    begin, end = tokenizer.token_to_id("<|begin|>"), tokenizer.token_to_id("<|end|>")
    named = {"pre": "llama-bpe", "bos_token_id": begin, "eos_token_id": end}
    middle = tokenizer.encode("hello", add_special_tokens=False).ids

    def around(**more: bool) -> list[int]:
        encoded: list[int] = read_tokenizer(written(tmp_path, tokenizer, "gpt2", **named, **more)).encode("hello").ids
        return encoded

    assert around() == [begin, *middle]
    assert around(add_bos_token=False) == middle
    assert around(add_eos_token=True) == [begin, *middle, end]


def test_special_tokens_and_templates_are_those_of_tokenizer_config_json(tmp_path: Path) -> None:
    file = written(tmp_path, byte_level(GPT2), "gpt2", bos_token_id=900, eos_token_id=901)
    content = tokenizer_metadata(byte_level(GPT2), "gpt2", bos_token_id=900, eos_token_id=901)
    templates = {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    file.write_bytes(container(content | templates | {"tokenizer.chat_templates": ["tool_use"]}, {}))
    assert gguf_settings(read_gguf(file)) == {
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}],
    }
    assert find_tokens(file, ["<|end|>", "<|absent|>"]) == {901}


@pytest.mark.parametrize(
    ("kind", "more", "named"),
    [
        ("t5", {}, r"tokenizer\.ggml\.model: 't5' is not read \(gpt2, llama\): put the tokenizer\.json"),
        ("gpt2", {"pre": "bloom"}, r"tokenizer\.ggml\.pre: 'bloom' is not known \(default, gpt-2, smollm"),
        ("gpt2", {"bos_token_id": 5000}, r"tokenizer\.ggml\.bos_token_id: is 5000, and there are 904 tokens"),
        ("gpt2", {"token_type": [1, 2]}, r"tokenizer\.ggml\.tokens: make no tokenizer"),
        ("llama", {}, r"tokenizer\.ggml\.scores: is missing"),
    ],
)
def test_what_is_not_known_is_refused_by_name(kind: str, more: dict[str, Any], named: str, tmp_path: Path) -> None:
    changes = {f"tokenizer.ggml.{key}": value for key, value in {"model": kind, **more}.items()}
    file = tmp_path / "own.gguf"
    file.write_bytes(container(tokenizer_metadata(byte_level(GPT2), "gpt2") | changes, {}))
    with pytest.raises(CheckpointError, match=named):
        read_tokenizer(file)


def test_a_file_without_a_tokenizer_says_what_to_put_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(container({"general.architecture": "llama"}, {}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens: is missing: put the tokenizer\.json"):
        read_tokenizer(file)
