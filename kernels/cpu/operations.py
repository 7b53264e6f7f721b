"""The `cpu` operations: packed weights, and small operations fused in C++ (`src/operations.cpp`).

A decode step calls these hundreds of times, a microsecond or two each. So each first asks, as cheaply
as Python can, whether all is as expected, and only if not `kernels.spec` looks again and says what is
wrong. A short call keeps the GIL: to give it up beside a busy thread costs as much as the call (2.3 against 4.4 µs).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p

import torch

from kernels.cpu.experts import open_experts
from kernels.cpu.library import Library
from kernels.cpu.linear import NativeLinear, open_embedding, open_linear
from kernels.cpu.quantized import can_keep, open_quantized
from kernels.cpu.segments import open_segments
from kernels.gates import Activation, Gate
from kernels.operations import Embedding, ExpertMaps, LinearMap, Operations, PlainLinear, QkNorm, Rotation, Routing
from kernels.quantized import QuantizedWeight, dequantized
from kernels.spec import Dims, check_block_pairs, check_rotate_and_store
from tandem.errors import InternalError

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Names, in native functions, of the dtypes that native kernels compute in."""

COMPUTED = "float32, bfloat16 and float16"

NAMES = {
    **{(dtype, dtype): name for dtype, name in DTYPES.items()},
    **{(dtype, torch.int8): f"{name}_int8" for dtype, name in DTYPES.items()},
    **{(dtype, torch.float8_e4m3fn): f"{name}_fp8" for dtype, name in DTYPES.items()},
}
"""Names, in native functions, of each pair of a computed dtype and a pool's dtype."""

NORM_NAMES = {
    **{(dtype, dtype): name for dtype, name in DTYPES.items()},
    **{(dtype, torch.float32): f"{name}_wide" for dtype, name in DTYPES.items() if dtype is not torch.float32},
}
"""The same for what they compute in and what the weight of a norm is."""

_SHORT_TOKENS = 16
"""The most tokens for which a call keeps the GIL: the call returns within tens of microseconds."""


class _Calls:
    """The native functions of one dtype, and of one way to treat the GIL."""

    __slots__ = ("add_rms_norm", "rms_norm", "rotate_and_store", "silu_mul")

    def __init__(self, library: Library, suffix: str, *, keeps_gil: bool) -> None:
        def bind(name: str, *argtypes: object) -> Callable[..., None]:
            return library.bind(name, *argtypes, keeps_gil=keeps_gil)

        address, size = c_void_p, c_int64
        norm = (address, size, address, address, size, size, c_float)
        add_norm = (address, size, address, size, address, address, size, size, c_float)
        norm_names = {weight: name for (dtype, weight), name in NORM_NAMES.items() if DTYPES[dtype] == suffix}
        self.rms_norm = {weight: bind(f"rms_norm_{name}", *norm) for weight, name in norm_names.items()}
        self.add_rms_norm = {weight: bind(f"add_rms_norm_{name}", *add_norm) for weight, name in norm_names.items()}
        """By what the weight is."""
        self.silu_mul = bind(f"silu_mul_{suffix}", address, size, address, size, size)
        self.rotate_and_store = {
            kv_dtype: bind(f"rotate_and_store_{name}", *(address,) * 4)
            for (dtype, kv_dtype), name in NAMES.items()
            if DTYPES[dtype] == suffix
        }
        """By what the pool holds."""


class CpuOperations(Operations):
    """Implements `kernels.operations.Operations` for float32, bfloat16 and float16 on the CPU.

    Keeps the last step's rotation, which its layers share, to check it once. For one thread.
    """

    __slots__ = ("_library", "_long", "_short", "_step")

    def __init__(self, library: Library) -> None:
        self._library = library
        self._short = {dtype: _Calls(library, suffix, keeps_gil=True) for dtype, suffix in DTYPES.items()}
        self._long = {dtype: _Calls(library, suffix, keeps_gil=False) for dtype, suffix in DTYPES.items()}
        self._step: _RotateStep | None = None

    @property
    def name(self) -> str:
        """Name of the set in the log, with its tier."""
        return f"cpu-{self._library.tier}"

    def keeps(self, weight: QuantizedWeight) -> bool:
        """See `Operations.keeps`: all but groups of odd sizes."""
        return can_keep(weight)

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> LinearMap:
        """See `Operations.linear`; what is returned may hold a packed copy instead of `weight`."""
        return self._native(weight, bias, None) or PlainLinear(dequantized(weight), bias)

    def tied_embedding(self, linear: LinearMap) -> Embedding | None:
        """See `Operations.tied_embedding`."""
        return open_embedding(self._library, linear)

    def gated_linear(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, gate: Gate = Activation.SILU
    ) -> LinearMap:
        """See `Operations.gated_linear`; rounded once where the weight is packed, else as two operations."""
        return self._native(weight, bias, gate) or super().gated_linear(weight, bias, gate)

    def wide_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> LinearMap:
        """See `Operations.wide_linear`."""
        return self._native(weight, bias, None, is_wide=True) or super().wide_linear(weight, bias)

    def segment_sum(self, segments: Sequence[LinearMap], borders: Sequence[int]) -> LinearMap | None:
        """See `Operations.segment_sum`: where all weights are packed."""
        return open_segments(self._library, segments, borders)

    def _native(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        gate: Gate | None,
        *,
        is_wide: bool = False,
    ) -> NativeLinear | None:
        if isinstance(weight, QuantizedWeight) and can_keep(weight):
            return open_quantized(self._library, weight, bias, gate, is_wide=is_wide)
        return open_linear(self._library, dequantized(weight), bias, gate, is_wide=is_wide)

    def experts(
        self,
        router: LinearMap,
        mlps: Sequence[tuple[LinearMap, LinearMap]],
        routing: Routing,
        shared_gate: LinearMap | None = None,
    ) -> ExpertMaps | None:
        """See `Operations.experts`: where all weights are packed."""
        return open_experts(self._library, router, mlps, routing, shared_gate)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operations.rms_norm`. Rounded once, at the end."""
        shape, dtype = x.shape, x.dtype
        if not (_is_rows(x, shape) and _is_weight(weight, shape[1], dtype)):
            raise _refusal(x=(x, ("T", "E")), weight=(weight, ("E",)))
        out = torch.empty_like(x)
        call = (self._short if shape[0] <= _SHORT_TOKENS else self._long)[dtype].rms_norm[weight.dtype]
        call(x.data_ptr(), x.stride()[0], weight.data_ptr(), out.data_ptr(), *shape, eps)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operations.add_rms_norm`. The sum is rounded to its dtype before the norm, the norm once at the end."""
        shape, dtype = x.shape, x.dtype
        if not (
            _is_rows(x, shape)
            and residual.shape == shape
            and residual.dtype is dtype
            and _is_rows(residual, shape)
            and _is_weight(weight, shape[1], dtype)
        ):
            raise _refusal(x=(x, ("T", "E")), residual=(residual, ("T", "E")), weight=(weight, ("E",)))
        out = torch.empty_like(x)
        call = (self._short if shape[0] <= _SHORT_TOKENS else self._long)[dtype].add_rms_norm[weight.dtype]
        call(
            *(x.data_ptr(), x.stride()[0], residual.data_ptr(), residual.stride()[0]),
            *(weight.data_ptr(), out.data_ptr(), *shape, eps),
        )
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, kv_layer: torch.Tensor
    ) -> None:
        """See `Operations.rotate_and_store`. Rounded once, after norm and rotation."""
        step = self._step
        if step is None or not step.fits(qkv, rotation, kv_layer):
            check_rotate_and_store(qkv, rotation, None, kv_layer)
            if (qkv.dtype, kv_layer.dtype) not in NAMES or not qkv.is_cpu:
                raise _refusal(qkv=(qkv, ("T", "H+2Hkv", "D")))
            step = self._step = _RotateStep(qkv, rotation, kv_layer)
        calls = (self._short if step.num_tokens <= _SHORT_TOKENS else self._long)[step.dtype]
        call = calls.rotate_and_store[step.kv_dtype]
        if qk_norm is None:
            call(qkv.data_ptr(), kv_layer.data_ptr(), step.address, None)
            return
        q_weight, k_weight = qk_norm.q_weight, qk_norm.k_weight
        q_width, k_width = step.norm_widths if qk_norm.is_whole else (step.head_dim, step.head_dim)
        if not (
            _is_weight(q_weight, q_width, step.dtype)
            and _is_weight(k_weight, k_width, step.dtype)
            and q_weight.dtype is k_weight.dtype
        ):
            check_rotate_and_store(qkv, rotation, qk_norm, kv_layer)
            raise _refusal(q_weight=(q_weight, ("q",)), k_weight=(k_weight, ("k",)))
        norm = HeadNorm.of(qk_norm, step.dtype)
        call(qkv.data_ptr(), kv_layer.data_ptr(), step.address, ctypes.addressof(norm))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operations.silu_mul`. Rounded once, at the end."""
        shape, dtype = gate_up.shape, gate_up.dtype
        if not _is_rows(gate_up, shape) or shape[1] % 2:
            raise _refusal(gate_up=(gate_up, ("T", "2I")))
        tokens, width = shape[0], shape[1] // 2
        out = torch.empty(tokens, width, dtype=dtype)
        call = (self._short if tokens <= _SHORT_TOKENS else self._long)[dtype].silu_mul
        call(gate_up.data_ptr(), gate_up.stride()[0], out.data_ptr(), tokens, width)
        return out

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """See `Operations.copy_blocks`. One copy of memory each, as fast as memory; torch's own indexing is slower."""
        dims, ids = check_block_pairs(pool, pairs), pairs.tolist()
        if not all(0 <= block < dims["N"] for pair in ids for block in pair):
            raise InternalError(f"pairs: {ids} of a pool of {dims['N']}")
        rows = pool.numpy()
        for source, target in ids:
            rows[target] = rows[source]


class RotateShape(ctypes.Structure):
    """`RotateShape` of `src/rotate_shape.h`, field by field."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "heads", "kv_heads", "head_dim", "block_size")),
        *((name, c_int64) for name in ("qkv_token", "qkv_head", "cos_token", "sin_token")),
        *((name, c_int64) for name in ("kv_block", "kv_side", "kv_head", "kv_slot")),
        *((name, c_void_p) for name in ("cos", "sin", "slots")),
    )

    @classmethod
    def of(
        cls, num_tokens: int, num_heads: int, strides: tuple[int, int], rotation: Rotation, kv_layer: torch.Tensor
    ) -> RotateShape:
        """Builds the shape of rows `[T, num_heads, D]` with these strides, KV heads included. The rotation must outlive
        the shape.
        """
        num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
        cos, sin, slots = rotation.cos, rotation.sin, rotation.slot_mapping
        return cls(
            *(num_tokens, num_heads - 2 * num_kv_heads, num_kv_heads, head_dim, block_size),
            *(*strides, cos.stride(0), sin.stride(0), *kv_layer.stride()[:4]),
            *(cos.data_ptr(), sin.data_ptr(), slots.data_ptr()),
        )


class HeadNorm(ctypes.Structure):
    """`HeadNorm` of `src/rotate_shape.h`."""

    _fields_ = (
        *((name, c_void_p) for name in ("q_weight", "k_weight")),
        *((name, c_int64) for name in ("is_wide", "is_whole")),
        ("eps", c_float),
    )

    @classmethod
    def of(cls, qk_norm: QkNorm, dtype: torch.dtype) -> HeadNorm:
        """Builds the norm of heads of `dtype`. `qk_norm` must outlive the result."""
        q_weight, k_weight = qk_norm.q_weight, qk_norm.k_weight
        is_wide = q_weight.dtype is not dtype
        return cls(q_weight.data_ptr(), k_weight.data_ptr(), int(is_wide), int(qk_norm.is_whole), qk_norm.eps)


class _RotateStep:
    """Checked arguments of one step's `rotate_and_store`, and the struct made of them.

    `address` points into `_struct`, whose pointers point into the tensors: all live as long as this does.
    """

    __slots__ = (
        *("_kv_shape", "_kv_strides", "_qkv_shape", "_qkv_strides", "_rotation", "_struct"),
        *("address", "dtype", "head_dim", "kv_dtype", "norm_widths", "num_tokens"),
    )

    def __init__(self, qkv: torch.Tensor, rotation: Rotation, kv_layer: torch.Tensor) -> None:
        self._rotation = rotation
        self._qkv_shape, self._qkv_strides = qkv.shape, qkv.stride()
        self._kv_shape, self._kv_strides = kv_layer.shape, kv_layer.stride()
        self.dtype, self.kv_dtype = qkv.dtype, kv_layer.dtype
        self.num_tokens, self.head_dim = qkv.shape[0], qkv.shape[2]
        num_kv_heads = kv_layer.shape[2]
        self.norm_widths = (qkv.shape[1] - 2 * num_kv_heads) * self.head_dim, num_kv_heads * self.head_dim
        self._struct = RotateShape.of(self.num_tokens, qkv.shape[1], (qkv.stride(0), qkv.stride(1)), rotation, kv_layer)
        self.address = ctypes.addressof(self._struct)

    def fits(self, qkv: torch.Tensor, rotation: Rotation, kv_layer: torch.Tensor) -> bool:
        """Whether the arguments belong to another layer of the same step."""
        return (
            self._rotation is rotation
            and qkv.stride() == self._qkv_strides
            and qkv.shape == self._qkv_shape
            and qkv.dtype is self.dtype
            and kv_layer.stride() == self._kv_strides
            and kv_layer.shape == self._kv_shape
            and kv_layer.dtype is self.kv_dtype
        )


def _is_rows(x: torch.Tensor, shape: torch.Size) -> bool:
    """Whether x is a matrix on the CPU with contiguous rows, of a dtype that we have."""
    return len(shape) == 2 and x.stride()[1] == 1 and x.is_cpu and x.dtype in DTYPES


def _is_weight(weight: torch.Tensor, width: int, dtype: torch.dtype) -> bool:
    """Whether it is a vector on the CPU of that width, and of that dtype or float32."""
    is_known = weight.dtype is dtype or weight.dtype is torch.float32
    return weight.numel() == width and is_known and weight.is_contiguous() and weight.is_cpu


def _refusal(**arguments: tuple[torch.Tensor, tuple[str, ...]]) -> InternalError:
    """Names the first argument, with its dimensions, that is not as the others or not what these kernels compute."""
    first, _ = next(iter(arguments.values()))
    dims = Dims()
    for name, (tensor, names) in arguments.items():
        dims.check(name, tensor, names, first.dtype, first.device)
    name = next(iter(arguments))
    what = f"{first.dtype} {list(first.shape)} on {first.device}"
    return InternalError(f"{name}: {what}; the native kernels compute {COMPUTED} on the CPU, in even halves")
