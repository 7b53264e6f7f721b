"""Argument checks at the kernels' door: shape, dtype, device and strides, each by name.

Sizes are symbolic: the first tensor that mentions `D` fixes it, later ones must agree. A
mismatch is our own bug, so it raises `InternalError`; nothing is cast or copied to fit. One
check is about a microsecond, cheap enough for every call.
"""

from __future__ import annotations

import torch

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.operations import QkNorm, Rotation
from kernels.quantized_kv import LARGEST
from tandem.errors import InternalError
from tandem.kv_layout import SCALE_BYTES


class Dims:
    """Symbolic sizes of one call, bound by the first tensor that mentions them."""

    __slots__ = ("_sizes",)

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes

    def check(
        self, name: str, tensor: torch.Tensor, dims: tuple[str, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Checks `tensor` against `dims`, `dtype`, `device`; its last dimension must be contiguous.

        Raises InternalError naming the argument and what differs.
        """
        shape = tensor.shape
        if len(shape) != len(dims):
            raise InternalError(f"{name}: shape {list(shape)} does not have dimensions [{', '.join(dims)}]")
        sizes = self._sizes
        for dim, size in zip(dims, shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise InternalError(f"{name}: {dim} is {size}, elsewhere {sizes[dim]}")
        if tensor.dtype != dtype:
            raise InternalError(f"{name}: dtype is {tensor.dtype}, expected {dtype}")
        if tensor.device != device:
            raise InternalError(f"{name}: device is {tensor.device}, expected {device}")
        if shape[-1] > 1 and tensor.stride(-1) != 1:
            raise InternalError(f"{name}: last dimension has stride {tensor.stride(-1)}, expected 1")

    def __getitem__(self, dim: str) -> int:
        return self._sizes[dim]


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What fused kernels compute; the reference takes float64 too."""


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raises InternalError unless `FLOATS` holds the dtype."""
    if tensor.dtype not in FLOATS:
        raise InternalError(f"{name}: dtype is {tensor.dtype}, expected one of {', '.join(map(str, FLOATS))}")


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> Dims:
    """Checks the arguments of `Operations.rms_norm`, or with `residual` of `add_rms_norm`; returns the bound sizes."""
    dims = Dims()
    check_float("x", x)
    dims.check("x", x, ("T", "E"), x.dtype, x.device)
    if residual is not None:
        dims.check("residual", residual, ("T", "E"), x.dtype, x.device)
    dims.check("weight", weight, ("E",), norm_dtype(weight, x.dtype), x.device)
    return dims


def norm_dtype(weight: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """What the weight of a norm of `dtype` has to be: float32 if it is that, else `dtype`."""
    return torch.float32 if weight.dtype is torch.float32 else dtype


def check_silu_mul(gate_up: torch.Tensor) -> Dims:
    """Checks the argument of `Operations.silu_mul`; returns the bound sizes."""
    dims = Dims()
    check_float("gate_up", gate_up)
    dims.check("gate_up", gate_up, ("T", "2I"), gate_up.dtype, gate_up.device)
    if dims["2I"] % 2:
        raise InternalError(f"gate_up: {dims['2I']} columns do not divide into gate and up")
    return dims


def check_rotate_and_store(
    qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, kv_layer: torch.Tensor
) -> Dims:
    """Checks the arguments of `Operations.rotate_and_store`; returns the bound sizes."""
    dims = Dims(KV=2)
    device, dtype = kv_layer.device, _check_kv_layer(dims, kv_layer, qkv)
    dims.check("qkv", qkv, ("T", "H+2Hkv", "D"), dtype, device)
    dims.check("cos", rotation.cos, ("T", "D/2"), torch.float32, device)
    dims.check("sin", rotation.sin, ("T", "D/2"), torch.float32, device)
    dims.check("slot_mapping", rotation.slot_mapping, ("T",), torch.int64, device)
    if qk_norm is not None:
        weights = {"q_weight": (qk_norm.q_weight, "H*D"), "k_weight": (qk_norm.k_weight, "Hkv*D")}
        for name, (weight, width) in weights.items():
            dims.check(name, weight, (width if qk_norm.is_whole else "D",), norm_dtype(weight, dtype), device)
        if qk_norm.is_whole and dims["H*D"] + 2 * dims["Hkv*D"] != dims["H+2Hkv"] * dims["D"]:
            raise InternalError(f"q_weight: {dims['H*D']} elements for {dims['H+2Hkv']} heads of {dims['D']}")
    if 2 * dims["D/2"] != dims["D"]:
        raise InternalError(f"cos: D/2 is {dims['D/2']} for D {dims['D']}")
    if (dims["H+2Hkv"] - 2 * dims["Hkv"]) % dims["Hkv"]:
        raise InternalError(f"qkv: {dims['H+2Hkv']} heads do not divide into {dims['Hkv']} KV heads and their queries")
    return dims


def check_attend(q: torch.Tensor, kv_layer: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams) -> Dims:
    """Checks the arguments of `AttentionBackend.attend`; returns the bound sizes."""
    dims = Dims(KV=2)
    device, dtype = kv_layer.device, _check_kv_layer(dims, kv_layer, q)
    dims.check("q", q, ("T", "H", "D"), dtype, device)
    dims.check("seq_lens", metadata.seq_lens, ("B",), torch.int32, device)
    dims.check("cu_seqlens_q", metadata.cu_seqlens_q, ("B+1",), torch.int32, device)
    dims.check("block_tables", metadata.block_tables, ("B", "max_blocks"), torch.int32, device)
    if dims["B+1"] != dims["B"] + 1:
        raise InternalError(f"cu_seqlens_q: has {dims['B+1']} entries for {dims['B']} seqs")
    if dims["H"] % dims["Hkv"]:
        raise InternalError(f"q: {dims['H']} heads do not divide into {dims['Hkv']} KV heads")
    if params.sinks is not None:
        dims.check("sinks", params.sinks, ("H",), torch.float32, device)
    return dims


def _check_kv_layer(dims: Dims, kv_layer: torch.Tensor, computed: torch.Tensor) -> torch.dtype:
    """Checks a layer of the pool; returns the dtype that belongs to it, of what is `computed` if it is quantized."""
    dims.check("kv_layer", kv_layer, ("N", "KV", "Hkv", "S", "D"), kv_layer.dtype, kv_layer.device)
    if kv_layer.dtype not in LARGEST:
        return kv_layer.dtype
    _, side, head, slot, _ = kv_layer.stride()
    nearest = min(side, head) if dims["Hkv"] > 1 else side
    expected = dims["S"] * (dims["D"] + SCALE_BYTES), dims["D"]
    if (nearest, slot) != expected:
        raise InternalError(f"kv_layer: sides or heads, and slots have strides {(nearest, slot)}, expected {expected}")
    return computed.dtype


def check_block_pairs(pool: torch.Tensor, pairs: torch.Tensor) -> Dims:
    """Checks (source, target) pairs of blocks within `pool`, bytes; returns the bound sizes."""
    dims = Dims(pair=2)
    dims.check("pool", pool, ("N", "block_bytes"), torch.uint8, pool.device)
    dims.check("pairs", pairs, ("M", "pair"), torch.int64, pool.device)
    return dims
