"""What `tandem doctor --model` says of one checkpoint: what it is, what it takes, what would compute it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from models.config import load_model_config, read_config, read_dtype
from models.files.gguf import find_gguf
from models.files.hub import fetched
from models.files.tokenizer_file import read_tokenizer
from models.preflight import NATIVE, TRANSFORMERS, Servable, read_servable
from models.rope_config import LongRopeScaling
from models.weight_files import find_weight_files
from router.chat_template import load_chat_template
from shell.config import DecodeConfig
from tandem.errors import ConfigError
from tandem.kv_layout import DType, KvLayout, QuantDType

_GIB = 1024**3
_MIB = 1024**2
_ROUNDED_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 32}
"""Bytes of a weight under `--quantize`, its share of a scale included."""
Row = tuple[str, str]


def model_rows(config: DecodeConfig) -> list[Row]:
    """Rows of name and value, at a worker's options. Raises CheckpointError, ConfigError, each with the remedy."""
    found = read_servable(fetched(config.model), config.model_impl)
    if found.quantization not in {None, "gguf"} and find_spec("torch") is not None:
        from models.quantization.config import read_quantization

        read_quantization(read_config(found.checkpoint.path))
    found = replace(found, checkpoint=found.checkpoint.within(config.context_tokens))
    if config.tensor_parallel is not None and find_spec("torch") is not None:
        from models.shard import check_shared

        check_shared(found.checkpoint.path, config.model_impl, config.tensor_parallel)
    layout, dtype = _kv_layout(found, config), _dtype(found.checkpoint.path, config)
    weight_bytes = _weight_bytes(found, dtype, config.quantize)
    return [*_identity(found, dtype, config), *_texts(found), *_memory(found, layout, weight_bytes, config)]


def _identity(found: Servable, dtype: DType, config: DecodeConfig) -> Iterator[Row]:
    checkpoint = found.checkpoint
    if config.quantize is not None and found.quantization is not None:
        raise ConfigError("--quantize", f"the checkpoint is quantised already ({found.quantization}): leave it out")
    yield "name", checkpoint.name
    yield "path", str(checkpoint.path)
    yield "family", f"{checkpoint.family}, computed by {found.implementation}"
    yield "dtype", str(dtype)
    yield "weights", _form(found, config.quantize)
    yield "context", f"{checkpoint.context_tokens} tokens{_rotation(found)}"
    if found.implementation == TRANSFORMERS and find_spec("transformers") is None:
        yield "missing", "transformers: install the extra `worker`"
    yield from _kernels(dtype, config)


def _rotation(found: Servable) -> str:
    if found.implementation != NATIVE:
        return ""
    scaling = load_model_config(found.checkpoint.path, found.checkpoint.context_tokens).rope.scaling
    if not isinstance(scaling, LongRopeScaling):
        return ""
    return f"; longrope with its factors for {'long' if scaling.is_long else 'short'} texts, whatever a text's length"


def _form(found: Servable, quantize: str | None) -> str:
    return found.quantization or (f"plain, rounded to {quantize}" if quantize else "plain")


def _texts(found: Servable) -> Iterator[Row]:
    texts = found.checkpoint.texts
    tokenizer = read_tokenizer(texts)
    size, vocab = tokenizer.get_vocab_size(), found.checkpoint.vocab_size
    more = "" if size <= vocab else f", of which the model knows {vocab}: it is of another model"
    yield "tokenizer", f"{size} tokens{more}"
    yield (
        "chat template",
        "none: chats are refused; prompts as text work" if load_chat_template(texts) is None else "yes",
    )
    ends = ", ".join(map(str, sorted(found.checkpoint.eos_token_ids)))
    yield "ends at", ends or "no token: answers run to max_tokens; set eos_token_id in generation_config.json"


def _memory(found: Servable, layout: KvLayout, weight_bytes: float, config: DecodeConfig) -> Iterator[Row]:
    """Prefill and decode workers take the same: each holds all weights and a pool."""
    context, size = found.checkpoint.context_tokens, config.num_ranks
    if size > 1:  # each rank has the whole embedding, and a K/V head at least
        weight_bytes += (size - 1) * _embedding_bytes(found)
        layout = replace(layout, num_kv_heads=size * max(1, layout.num_kv_heads // size))
    yield "weights of a worker", f"about {weight_bytes / _GIB:.2f} GiB"
    yield (
        "KV of a token",
        f"{layout.token_bytes} bytes; of a full context {layout.token_bytes * context / _MIB:.0f} MiB",
    )
    if find_spec("torch") is None:
        return
    from engine.loading import resolve_device
    from engine.memory import available_memory_bytes, blocks_that_fit, check_memory, seqs_of

    device = resolve_device(config.device)
    most_tokens = seqs_of(config.max_seqs, device) * context
    num_blocks = blocks_that_fit(config, layout, device, most_tokens)
    check_memory(layout, num_blocks, device)
    pool_bytes, available = num_blocks * layout.block_bytes, available_memory_bytes(device)
    num_tokens = num_blocks * layout.block_size
    room = f"{num_tokens} tokens, {num_tokens / context:.1f} full contexts"
    for role in ("prefill", "decode"):
        yield f"pool of a {role} worker", f"{num_blocks} blocks, {pool_bytes / _GIB:.2f} GiB: {room}"
    wanted = weight_bytes + pool_bytes
    if size > 1:
        each = f"about {weight_bytes / size / _GIB:.2f} GiB of weights, {pool_bytes / size / _GIB:.2f} GiB of KV"
        yield "ranks of a worker", f"{size}, each with {each}"
    told = f"{2 * wanted / _GIB:.2f} GiB for one worker of each role, {available / _GIB:.2f} GiB available on {device}"
    if 2 * wanted > available:
        told += ": too little; a smaller --kv-memory, --quantize int8, or one worker per machine"
    yield "together", told


def _kernels(dtype: DType, config: DecodeConfig) -> Iterator[Row]:
    if find_spec("torch") is None:
        yield "kernels", "not known without torch: install the extra `worker`"
        return
    from engine.loading import resolve_device
    from kernels.dispatch import select_kernels
    from kvtransfer import transports
    from models.dtypes import torch_dtype

    device = resolve_device(config.device)
    kernels = select_kernels(config.attention_backend, device, torch_dtype(dtype), config.cpu_tier)
    yield "kernels", f"{kernels.name} on {device}, operations by {kernels.operations.name}"
    yield "transports", ", ".join(transports.choose(config.transport, device, config.num_ranks)[0])


def _dtype(path: Path, config: DecodeConfig) -> DType:
    saved = read_dtype(read_config(path)) or DType.FLOAT32
    return saved if config.dtype == "auto" else DType(config.dtype)


def _kv_layout(found: Servable, config: DecodeConfig) -> KvLayout:
    path = found.checkpoint.path
    dtype = _dtype(path, config) if config.kv_dtype == "auto" else QuantDType(config.kv_dtype)
    if found.implementation == NATIVE:
        shape = load_model_config(path)
        return KvLayout(shape.num_layers, shape.num_kv_heads, config.block_size, shape.head_dim, dtype)
    read = read_config(path)
    num_heads = read.integer("num_attention_heads")
    head_dim = read.integer("head_dim", read.integer("hidden_size") // num_heads)
    num_kv_heads = read.integer("num_key_value_heads", num_heads)
    return KvLayout(read.integer("num_hidden_layers"), num_kv_heads, config.block_size, head_dim, dtype)


def _embedding_bytes(found: Servable) -> int:
    """In the dtype of the file."""
    shape, saved = load_model_config(found.checkpoint.path), read_dtype(read_config(found.checkpoint.path))
    return shape.vocab_size * shape.hidden_size * (saved or DType.FLOAT32).itemsize_bytes


def _weight_bytes(found: Servable, dtype: DType, quantize: str | None) -> float:
    """As held by a worker, by the size of the files. Raises CheckpointError if one is missing."""
    path = found.checkpoint.path
    gguf = find_gguf(path)
    files = (gguf,) if gguf is not None else find_weight_files(path).paths
    num_bytes = sum(file.stat().st_size for file in files)
    if found.quantization is not None:
        return num_bytes
    saved = (read_dtype(read_config(path)) or DType.FLOAT32).itemsize_bytes
    held = dtype.itemsize_bytes if quantize is None else _ROUNDED_BYTES[quantize]
    return num_bytes / saved * held
