"""A model folder in Hugging Face layout, as far as it can be known without torch.

Reads config.json, generation_config.json and the end of text of the tokenizer; never opens weights. Every problem is a
CheckpointError that names the file and the key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from models.config_json import ConfigJson
from models.files.gguf import SUFFIX, find_gguf, read_gguf
from models.files.hub import fetched, hub_name
from models.files.language_part import language_config
from models.files.model_path import check_model_path
from models.files.read_files import ReadFiles
from models.files.tokenizer_file import TOKENIZER_FILE, find_tokens
from tandem.errors import ConfigError
from tandem.types import TokenId

DEMO = "demo"
"""The model that is shipped with the source."""

_DEMO_PATH = Path(__file__).resolve().parents[1] / "demo" / "checkpoint"
_FINGERPRINTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
_SPECIAL_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that may hold `eos_token`; the first file that has the key counts."""
_SAMPLING_DEFAULTS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (1e-6, 1),
    "top_k": (0, 2**31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
"""What is taken from generation_config.json, and its bounds: a bad default would fail every request."""
_FACTOR_ROPES = frozenset({"linear", "dynamic", "yarn"})
"""Rope scalings whose factor stretches the context; llama3's max_position_embeddings already includes its factor."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What router and workers must know of a model before its weights are read."""

    name: str
    path: Path
    """A folder, or a GGUF file: where the name led, whatever it leads to later."""
    config: Mapping[str, Any]
    """config.json, or what a GGUF file says in its place."""
    family: str
    """config.json's `model_type`."""
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[TokenId]
    generation_defaults: Mapping[str, float | int]
    """Values of temperature, top_p, top_k, min_p and repetition_penalty that the checkpoint sets."""
    config_fingerprint: str
    """Hash of config, generation config, tokenizer and chat template files."""
    read: ReadFiles = field(compare=False)
    """Files that `config_fingerprint` covers. Whoever reads these files again checks them against this record."""
    other_names: tuple[str, ...] = ()
    """Further names by which clients may ask for the model."""

    def called(self, names: tuple[str, ...]) -> CheckpointInfo:
        """The same, known to clients by these names instead, if there are any; the first is its own."""
        return replace(self, name=names[0], other_names=names[1:]) if names else self

    def within(self, context_tokens: int | None) -> CheckpointInfo:
        """The same, of which sequences up to that length are served; None = as long as the model's context.

        Raises ConfigError if that is longer.
        """
        if context_tokens is None:
            return self
        if context_tokens > self.context_tokens:
            raise ConfigError("--context-tokens", f"{context_tokens} is above the model's {self.context_tokens}")
        return replace(self, context_tokens=context_tokens)

    def answers_to(self, name: str) -> bool:
        """Whether `name` means this model; an empty name means whatever is served."""
        return not name or name in (self.name, *self.other_names)

    @property
    def texts(self) -> Path:
        """Where tokenizer and chat template lie: a folder, or the GGUF file that has its own."""
        return _texts(self.path)


def _texts(path: Path) -> Path:
    folder = path if path.is_dir() else path.parent
    return folder if (folder / TOKENIZER_FILE).exists() else find_gguf(path) or folder


def resolve_model(model: str) -> Path:
    """The checkpoint folder or GGUF file that `--model` names, fetched if it is of the hub. Raises CheckpointError."""
    path = _DEMO_PATH if model == DEMO else Path(fetched(model))
    check_model_path(model, path)
    return path


def read_checkpoint(model: str) -> CheckpointInfo:
    """Reads the folder or file that `--model` names. Raises CheckpointError with file and key."""
    named = resolve_model(model)
    path = named.resolve() if named.is_dir() else named.parent.resolve() / named.name
    gguf = find_gguf(path)
    folder = path if path.is_dir() else path.parent
    read = ReadFiles(*(folder / name for name in _FINGERPRINTED), *([gguf] if gguf else []))
    given = ConfigJson.read(path / "config.json") if gguf is None else ConfigJson(gguf, read_gguf(gguf).config())
    config = ConfigJson(given.path, language_config(given.items))
    generation = ConfigJson.read(folder / "generation_config.json", optional=True)
    vocab_size = config.integer("vocab_size")
    ends = _eos_token_ids(generation, vocab_size) or _eos_token_ids(config, vocab_size)
    info = CheckpointInfo(
        name=DEMO if model == DEMO else hub_name(named) or Path(os.path.abspath(named)).name,  # of a link, its own
        path=path,
        config=MappingProxyType(dict(config.items)),
        family=config.text("model_type"),
        vocab_size=vocab_size,
        context_tokens=_context_tokens(config),
        eos_token_ids=ends | _tokenizer_ends(config, _texts(path), vocab_size, is_gguf=gguf is not None),
        generation_defaults=_generation_defaults(generation),
        config_fingerprint=_fingerprint(folder, config, gguf if _texts(path) == gguf else None),
        read=read,
    )
    read.check()
    return info


def _context_tokens(config: ConfigJson) -> int:
    trained = config.integer("max_position_embeddings")
    if config.items.get("model_type") in {"gemma3_text", "phi3"}:  # of a scaled rope, max_position_embeddings is that
        return trained
    rope = config.section("rope_scaling" if config.items.get("rope_scaling") else "rope_parameters")
    kind = rope.items.get("rope_type", rope.items.get("type"))
    if kind not in _FACTOR_ROPES or not rope.has("factor"):  # yarn infers a factor that leads here
        return trained
    if kind == "yarn":  # outside of the rope section it takes precedence
        key = "original_max_position_embeddings"
        trained = (config if config.has(key) else rope).integer(key, trained)
    return int(trained * rope.number("factor"))


def _eos_token_ids(document: ConfigJson, vocab_size: int) -> frozenset[TokenId]:
    value = document.items.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < vocab_size for each in ids):
        raise document.error("eos_token_id", f"must be a token id below {vocab_size}, or a list of them")
    return frozenset(TokenId(each) for each in ids)


def _tokenizer_ends(config: ConfigJson, texts: Path, vocab_size: int, *, is_gguf: bool) -> frozenset[TokenId]:
    """The tokenizer's `eos_token`, which is all that many fine-tunes change, and, of GGUF files of Gemma 3,
    `<end_of_turn>`, which they seldom name.
    """
    documents = (ConfigJson.read(texts / each, optional=True) for each in _SPECIAL_TOKENS)
    token = next(filter(None, (each.items.get("eos_token") for each in documents)), None)
    ends = [token.get("content") if isinstance(token, dict) else token]
    if is_gguf and config.items["model_type"] == "gemma3_text":
        ends.append("<end_of_turn>")
    found = find_tokens(texts, [name for name in ends if isinstance(name, str)])
    return frozenset(TokenId(each) for each in found if each < vocab_size)


def _generation_defaults(generation: ConfigJson) -> Mapping[str, float | int]:
    found = {key: generation.number(key, is_signed=True) for key in _SAMPLING_DEFAULTS if generation.has(key)}
    if generation.items.get("do_sample") is False:
        found["temperature"] = 0.0  # an explicit no; where the key is missing, temperature decides
    for key, value in found.items():
        low, high = _SAMPLING_DEFAULTS[key]
        if key == "top_k" and value == -1:
            found[key] = 0  # as vLLM writes "all"
        elif not low <= value <= high or (key == "top_k" and value != int(value)):
            raise generation.error(key, f"{value:g} is not in [{low:g}, {high:g}]")
    return MappingProxyType({key: int(value) if key == "top_k" else value for key, value in found.items()})


def _fingerprint(folder: Path, config: ConfigJson, gguf: Path | None) -> str:
    """`gguf`: the file whose own tokenizer and chat template are taken."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _FINGERPRINTED:
        file = folder / name
        content = file.read_bytes() if file.exists() else b""
        if config.path.suffix == SUFFIX and name == "config.json":
            content = json.dumps(config.items, sort_keys=True).encode()
        digest.update(f"{name}:{len(content)}:".encode() + content)
    if gguf is not None:
        digest.update(read_gguf(gguf).header())
    return digest.hexdigest()
