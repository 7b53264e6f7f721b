"""GGUF files of a checkpoint of `bench.support.checkpoints`, for llama.cpp: run by its environment's python, as a file.

`… MODEL_DIR TYPE…` writes `MODEL_DIR/<TYPE>.gguf` for each. BF16 has the checkpoint's own bits, norms in float32;
from it llama.cpp quantises the others itself. The container is written by the package gguf. There is no vocabulary:
prompts are token ids.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_BF16 = "BF16"
_OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def gguf_name(name: str) -> str:
    """What GGUF calls a tensor of Llama or Qwen3. Raises KeyError for any other."""
    stem, _, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    return f"{_OF_MODEL[stem]}.{kind}" if layer is None else f"blk.{layer[1]}.{_OF_LAYER[layer[2]]}.{kind}"


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """`rows` `[H * D, in]` in llama.cpp's order for Llama: the rotated pair (j, j + D/2) of a head side by side."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Name and bits, uint16, of each bfloat16 tensor of a safetensors file."""
    size = int(np.fromfile(path, "<u8", 1)[0])
    with path.open("rb") as file:
        header = json.loads(file.read(8 + size)[8:])
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            bits = np.fromfile(path, "<u2", (end - begin) // 2, offset=8 + size + begin)
            yield name, bits.reshape(entry["shape"])


def write_bf16(model: Path, path: Path) -> None:
    """The checkpoint as it is."""
    gguf: Any = importlib.import_module("gguf")  # not in the environment that checks types
    config = json.loads((model / "config.json").read_text())
    family, heads, kv_heads = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    permuted = {"attn_q": heads, "attn_k": kv_heads} if family == "llama" else {}
    for source, bits in read_tensors(model / "model.safetensors"):
        name = gguf_name(source)
        if bits.ndim == 1:
            writer.add_tensor(name, (bits.astype("<u4") << 16).view("<f4"))
            continue
        stem = name.split(".")[-2]
        ordered = interleaved(bits, permuted[stem]) if stem in permuted else bits
        raw = np.ascontiguousarray(ordered).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, file_type: str) -> None:
    """By llama.cpp itself. Raises RuntimeError if it fails."""
    llama: Any = importlib.import_module("llama_cpp")
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    if code := llama.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise RuntimeError(f"llama.cpp quantises {source} to {file_type} with {code}")


def main() -> int:
    """Writes them."""
    model = Path(sys.argv[1])
    plain = model / f"{_BF16}.gguf"
    write_bf16(model, plain)
    for file_type in sys.argv[2:]:
        if file_type != _BF16:
            quantize(plain, model / f"{file_type}.gguf", file_type)
    return 0


if __name__ == "__main__":
    sys.exit(main())
