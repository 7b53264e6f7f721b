"""Writes tiny GGUF files from a checkpoint's config, with random blocks for weights, and says what they mean."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from models.gguf_blocks import BLOCKS

Q4_0, Q8_0, Q4_K, Q6_K, F32, F16, BF16 = 2, 8, 12, 14, 0, 1, 30
SCALES = {
    Q4_0: {0: 0.05},
    Q8_0: {0: 0.003},
    Q4_K: {0: 5e-4, 2: 4e-3},
    Q6_K: {208: 8e-5},
}
"""Where in a block a half-precision number lies, and what it is."""
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""Tokens of single bytes, as SentencePiece writes them."""
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, parts: Mapping[str, str] = PARTS) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, part = name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{part}"
    layer, module = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{parts[module]}.{part}"


def random_blocks(kind: int, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bytes of `shape` weights, a row for each output."""
    blocks = BLOCKS[kind]
    raw = np.random.default_rng(seed).integers(
        0, 256, (shape[0], shape[1] // blocks.num_inputs, blocks.num_bytes), dtype=np.uint8
    )
    for start, value in SCALES[kind].items():
        raw[..., start : start + 2] = np.array([value], dtype=np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1)


def write_gguf(plain: Path, folder: Path, kinds: tuple[int, ...], **metadata: Any) -> tuple[Path, Path]:
    """A GGUF file whose matrices are of `kinds` in turn, and a plain checkpoint that means the same."""
    meant = shutil.copytree(plain, folder / "meant")
    config = json.loads((plain / "config.json").read_text())
    weights, tensors = load_file(plain / "model.safetensors"), {}
    is_gemma = config["model_type"] == "gemma3_text"
    matrices = 0
    for name, tensor in weights.items():
        kind, rows = F32, tensor.numpy()
        if tensor.dim() == 2:
            kind, matrices = kinds[matrices % len(kinds)], matrices + 1
        if kind in BLOCKS:
            rows = random_blocks(kind, tuple(tensor.shape), matrices)
            blocks = torch.from_numpy(rows.reshape(len(rows), -1, BLOCKS[kind].num_bytes).copy())
            weights[name] = BLOCKS[kind].decode(blocks, torch.float32).dequantize()
        elif kind != F32:
            half = tensor.to(torch.float16 if kind == F16 else torch.bfloat16)
            weights[name], rows = half.to(torch.float32), half.view(torch.int16).numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads and config["model_type"] == "llama":  # rows (head, side, pair) become (head, pair, side)
            by_head = rows.reshape(config[heads], 2, -1, *rows.shape[1:])
            rows = by_head.swapaxes(1, 2).reshape(rows.shape)
        if is_gemma and tensor.dim() == 1:
            rows = 1 + rows
        tensors[gguf_name(name, GEMMA_PARTS if is_gemma else PARTS)] = (tuple(tensor.shape), kind, rows.tobytes())
    save_file(
        {name: each.contiguous() for name, each in weights.items()}, meant / "model.safetensors", {"format": "pt"}
    )
    file = folder / "files" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(container(metadata_of(config) | metadata, tensors))
    shutil.copy(plain / "tokenizer.json", file.parent)
    return file, meant


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    arch = config["model_type"].removesuffix("_text")
    rope = config["rope_parameters"]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if config.get("sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
    if config.get("head_dim"):
        values |= {"attention.key_length": config["head_dim"], "rope.dimension_count": config["head_dim"]}
    keyed = {f"{arch}.{key}": value for key, value in values.items()}
    return {"general.architecture": arch, "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.5], **keyed}


def container(metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key) + typed(value)
    offset, content = 0, b""
    for name, (shape, kind, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", kind, offset)
        content += raw + bytes(-len(raw) % 32)
        offset = len(content)
    return head + bytes(-len(head) % 32) + content


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        if isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        kind, code = (6, "f") if isinstance(value[0], float) else (5, "i")
        return struct.pack("<IIQ", 9, kind, len(value)) + struct.pack(f"<{len(value)}{code}", *value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def tokenizer_metadata(tokenizer: Tokenizer, kind: str, **more: Any) -> dict[str, Any]:
    """What a converter writes of a tokenizer; `more` by key, behind `tokenizer.ggml.`."""
    described = json.loads(tokenizer.to_str())
    added = {token_id: token.special for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    types = [
        3 if added.get(index) else 4 if index in added else 6 if each in BYTES else 1
        for index, each in enumerate(tokens)
    ]
    if (unknown := described["model"].get("unk_token")) is not None:
        types[tokens.index(unknown)] = 2
    values = {"model": kind, "tokens": tokens, "token_type": types, **more}
    if kind == "gpt2":
        values["merges"] = [" ".join(pair) for pair in described["model"]["merges"]]
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}
