"""Strict reading of a GGUF file's tensors, by Hugging Face's names: exactly the expected ones, each of its shape.

GGUF lays out the rows of q and k of llama for rotation of neighbouring pairs; they are put back here. It adds 1 to the
norms of Gemma, which is taken away again. Types of blocks that are not in `models.gguf_blocks` are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import torch

from kernels.quantized import QuantizedWeight, dequantized
from models.config import ModelConfig
from models.files.gguf import Gguf, GgufTensor
from models.gguf_blocks import BLOCKS, PLAIN
from models.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD, Shape, expected_tensors, layer_prefix
from tandem.errors import CheckpointError
from tandem.kv_layout import DType

_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Instead, where what attention and MLP return is normed too."""
_DERIVED = "rope_freqs.weight"
"""Already in the config."""
_PAIRED = "llama"
"""The architecture whose q and k are laid out anew."""


class GgufStore:
    """All tensors of one file, checked when entered; what `TensorStore` is to safetensors."""

    def __init__(self, gguf: Gguf, config: ModelConfig) -> None:
        self._gguf = gguf
        self._config = config
        layer_names = _LAYER_NAMES | (_POST_NORM_NAMES if config.traits.norms.after_attention else {})
        self._name_of = _NAMES | {
            f"{layer_prefix(layer)}{ours}.{part}": f"blk.{layer}.{theirs}.{part}"
            for layer in range(config.num_layers)
            for ours, theirs in layer_names.items()
            for part in ("weight", "bias")
        }

    def __enter__(self) -> GgufStore:
        expected = {self._name_of[name]: shape for name, shape in expected_tensors(self._config).items()}
        self._check(expected)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing stays open."""

    @property
    def method(self) -> str | None:
        """How weights are stored, or None if weights are plain."""
        names = {BLOCKS[each.kind].name for each in self._gguf.tensors.values() if each.kind in BLOCKS}
        return f"gguf {', '.join(sorted(names))}" if names else None

    @property
    def rounds_activations(self) -> bool:
        """Whether the checkpoint was made for activations in 8 bits."""
        return False

    def saved_dtype(self) -> DType:
        """What activations are if nobody says so: as the config derived from the file has it."""
        return self._config.dtype or DType.BFLOAT16

    def is_quantized(self, name: str) -> bool:
        """Whether the weight `name` is stored quantised."""
        tensor = self._gguf.tensors.get(self._name_of[name])
        return tensor is not None and tensor.kind in BLOCKS

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a copy of a tensor, dequantised if need be."""
        content = dequantized(self.read_weight(name, dtype, device))
        return content - 1 if self._config.traits.norm_offset and name.endswith("norm.weight") else content

    def read_weight(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor | QuantizedWeight:
        """The weight of one linear map, for activations of `dtype`, in the form that the file has it in."""
        tensor = self._gguf.tensors[self._name_of[name]]
        content = torch.frombuffer(bytearray(self._bytes(tensor)), dtype=torch.uint8)
        rows = self._rows(name)
        if tensor.kind in PLAIN:
            plain = content.view(PLAIN[tensor.kind]).view(tensor.shape)
            return (plain if rows is None else plain[rows]).to(device=device, dtype=dtype)
        blocks = BLOCKS[tensor.kind]
        weight = blocks.decode(content.view(tensor.shape[0], -1, blocks.num_bytes), dtype)
        return (weight if rows is None else weight.rows(rows)).to(device)

    def _rows(self, name: str) -> torch.Tensor | None:
        """Where each row of q and k lies, if not in order: theirs are (head, pair, side), ours (head, side, pair)."""
        is_q, is_k = ".q_proj." in name, ".k_proj." in name
        if self._config.family != _PAIRED or not (is_q or is_k):
            return None
        heads = self._config.num_heads if is_q else self._config.num_kv_heads
        head_dim = self._config.head_dim
        return torch.arange(heads * head_dim).view(heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)

    def _bytes(self, tensor: GgufTensor) -> bytes:
        size = _num_bytes(tensor)
        with self._gguf.path.open("rb") as file:
            file.seek(tensor.offset)
            content = file.read(size)
        if len(content) < size:
            raise CheckpointError(f"{self._gguf.path}: ends within a tensor, at byte {tensor.offset + len(content)}")
        return content

    def _check(self, expected: Mapping[str, Shape]) -> None:
        found, path = self._gguf.tensors, self._gguf.path
        for name, shape in expected.items():
            if name not in found:
                raise CheckpointError(f"{name}: tensor is missing from {path}")
            where = f"{name}: tensor in {path}"
            if found[name].shape != shape:
                raise CheckpointError(f"{where} has shape {list(found[name].shape)}, not {list(shape)}")
            kind = found[name].kind
            if kind not in PLAIN and kind not in BLOCKS:
                known = ", ".join(blocks.name for blocks in BLOCKS.values())
                raise CheckpointError(f"{where} has type number {kind}; F32, F16, BF16, {known} are read")
            if kind in BLOCKS and (len(shape) != 2 or shape[1] % BLOCKS[kind].num_inputs):
                raise CheckpointError(f"{where} has shape {list(shape)}, which is not of whole blocks")
        extra = [name for name in found if name not in expected and name != _DERIVED]
        if extra:
            raise CheckpointError(f"{extra[0]}: tensor in {path} does not belong to this model")


def _num_bytes(tensor: GgufTensor) -> int:
    count = torch.Size(tensor.shape).numel()
    if tensor.kind in PLAIN:
        return count * PLAIN[tensor.kind].itemsize
    blocks = BLOCKS[tensor.kind]
    return count // blocks.num_inputs * blocks.num_bytes
