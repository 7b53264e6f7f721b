"""The container GGUF: its metadata, where its tensors lie, and what config.json would say.

Versions 2 and 3, little-endian. Needs neither torch nor numpy: routers read it too. What the bytes of a tensor mean is
in `models/gguf_blocks.py`. Source: the format's specification, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
"""Format of each value type, by its number, as `struct` names it."""
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 24
"""Most metadata, tensors or items of an array: a file that says more is damaged."""
_MAX_DIMS = 4
_FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""`model_type` and architecture by the name of an architecture in GGUF; Mistral is called llama there."""
_GEMMA3_27B_LAYERS = 62
"""The one size of Gemma 3 whose scores are not scaled by the size of a head; no key says so."""
_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Types of tensors that are not quantised, by number."""
_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies; its bytes are in the file's order of rows."""

    shape: tuple[int, ...]
    """Rows first, in torch's order."""
    kind: int
    """The number of its type."""
    offset: int
    """From the beginning of the file, in bytes."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """What a file says before its tensors are read."""

    path: Path
    metadata: Mapping[str, Any]
    """Numbers, truth values, texts, and lists of them."""
    tensors: Mapping[str, GgufTensor]

    def config(self) -> dict[str, Any]:
        """The content of an equal config.json. Raises CheckpointError naming the key."""
        name = self.metadata.get("general.architecture")
        if name not in _FAMILIES:
            raise self.error(
                "general.architecture", f"{name!r} is not supported ({', '.join(_FAMILIES)}): take its safetensors"
            )
        model_type, architecture = _FAMILIES[name]
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise self.error("token_embd.weight", "tensor is missing")
        heads = self._of("attention.head_count")
        head_dim = self._of("attention.key_length", self._of("embedding_length") // max(heads, 1))
        if self._of("rope.dimension_count", head_dim) != head_dim:
            raise self.error(f"{name}.rope.dimension_count", f"is not the {head_dim} of a head")
        config = {
            "model_type": model_type,
            "architectures": [architecture],
            "vocab_size": embedding.shape[0],
            "hidden_size": self._of("embedding_length"),
            "num_hidden_layers": self._of("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._of("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self._of("feed_forward_length"),
            "rms_norm_eps": self._of("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._of("context_length"),
            "rope_theta": self._of("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(name, head_dim),
            "sliding_window": self.metadata.get(f"{name}.attention.sliding_window"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self.tensors,
            "dtype": _PLAIN.get(embedding.kind, "bfloat16"),
        }
        if name == "gemma3":
            is_27b = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
            config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_27b else head_dim
            config["rope_local_base_freq"] = self._of("rope.freq_base_swa", 10000.0)
        config["bos_token_id"] = self.metadata.get("tokenizer.ggml.bos_token_id")
        ends = {self.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")}
        ends.discard(None)
        config["eos_token_id"] = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
        return {key: value for key, value in config.items() if value is not None}

    def header(self) -> bytes:
        """Returns the bytes before the tensors: metadata, tokenizer included, and the places of the tensors."""
        with self.path.open("rb") as file:
            return file.read(min((each.offset for each in self.tensors.values()), default=-1))

    def error(self, key: str, problem: str) -> CheckpointError:
        """The error to raise about `key`."""
        return CheckpointError(f"{self.path}: {key}: {problem}")

    def _of(self, key: str, default: Any = None) -> Any:
        full = f"{self.metadata['general.architecture']}.{key}"
        value = self.metadata.get(full, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(full, f"is {value!r}, not a number" if full in self.metadata else "is missing")
        return value

    def _rope_scaling(self, name: str, head_dim: int) -> dict[str, Any] | None:
        kind = self.metadata.get(f"{name}.rope.scaling.type", "none")
        freqs = self.tensors.get(_ROPE_FREQS)
        if freqs is not None and kind == "none":
            return self._llama3_scaling(freqs, head_dim)
        if freqs is not None or kind not in {"none", "linear"}:
            raise self.error(f"{name}.rope.scaling.type", f"{kind!r} is not read; take the checkpoint it was made from")
        return None if kind == "none" else {"rope_type": "linear", "factor": self._of("rope.scaling.factor")}

    def _llama3_scaling(self, freqs: GgufTensor, head_dim: int) -> dict[str, Any]:
        """Llama 3's scaling, of which the file holds only what each frequency is divided by."""
        count = head_dim // 2
        if freqs.shape != (count,) or freqs.kind != 0:
            raise self.error(_ROPE_FREQS, f"is not float32 of {count}")
        with self.path.open("rb") as file:
            file.seek(freqs.offset)
            found = struct.unpack(f"<{count}f", file.read(4 * count))
        factor, low, high = max(found), _LLAMA3_CONTEXT_TOKENS, _LLAMA3_CONTEXT_TOKENS / 4
        for index, divisor in enumerate(found):
            wavelength = 2 * math.pi * self._of("rope.freq_base", 10000.0) ** (2 * index / head_dim)
            smooth = (_LLAMA3_CONTEXT_TOKENS / wavelength - 1) / 3
            blended = 1 / ((1 - smooth) / factor + smooth)
            wanted = 1.0 if wavelength < high else factor if wavelength > low else blended
            if not math.isclose(divisor, wanted, rel_tol=1e-3):
                raise self.error(_ROPE_FREQS, "is not Llama 3's scaling; take the checkpoint that it was made from")
        return _LLAMA3 | {"factor": factor, "original_max_position_embeddings": _LLAMA3_CONTEXT_TOKENS}


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the only one of a folder without config.json.

    Raises CheckpointError if there are several.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise CheckpointError(f"{path}: holds {len(files)} GGUF files; name one of them, such as {files[0].name}")
    return files[0] if files else None


def read_gguf(path: Path) -> Gguf:
    """Reads all but the tensors' bytes. Raises CheckpointError naming the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            return _Cursor(mapping).read(path)
    except (OSError, ValueError, struct.error, IndexError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: is no readable GGUF file: {error}: download it again") from error


class _Cursor:
    """A place in a file, and what is read from there on."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._at = 0

    def read(self, path: Path) -> Gguf:
        """The whole header. Raises ValueError, struct.error."""
        if self._mapping[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported ({', '.join(map(str, _VERSIONS))})")
        num_tensors, num_values = self._count("Q"), self._count("Q")
        metadata = {self._text(): self._value(self._scalar("I")) for _ in range(num_values)}
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        tensors = {name: GgufTensor(shape, kind, start + offset) for name, shape, kind, offset in found}
        return Gguf(path, metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._text(), self._scalar("I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"{name} has {num_dims} dimensions")
        shape = tuple(self._count("Q") for _ in range(num_dims))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("I"), self._count("Q")
        if item == _STRING:
            return self._texts(count)
        if item not in _SCALARS:
            return [self._value(item) for _ in range(count)]
        values = struct.Struct(f"<{count}{_SCALARS[item]}")
        self._at += values.size
        return list(values.unpack_from(self._mapping, self._at - values.size))

    def _texts(self, count: int) -> list[str]:
        """As `_text`, of which a tokenizer has hundreds of thousands."""
        mapping, at, length_at = self._mapping, self._at, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            (length,) = length_at(mapping, at)
            at += 8 + length
            texts.append(mapping[at - length : at].decode("utf-8", "replace"))
        self._at = at
        return texts

    def _text(self) -> str:
        return self._texts(1)[0]

    def _count(self, code: str) -> int:
        count = int(self._scalar(code))
        if count > _MAX_COUNT:
            raise ValueError(f"it says {count} of something")
        return count

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._mapping, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value
