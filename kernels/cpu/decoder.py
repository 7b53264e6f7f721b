"""A decoder step as one native call (`src/decoder.cpp`): the plan is made once, a step brings a few pointers.

All that a step reads and writes is checked before the call. Which thread computes what is not known here.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p

import torch

from kernels.compiled_step import DecoderParts, LayerParts, StepInputs
from kernels.cpu.attention import AttendShape, check_lengths
from kernels.cpu.experts import NativeExperts
from kernels.cpu.library import Library
from kernels.cpu.linear import NativeLinear
from kernels.cpu.operations import DTYPES, NAMES, NORM_NAMES, HeadNorm, RotateShape
from kernels.operations import LinearMap, Rotation
from kernels.spec import Dims
from tandem.errors import InternalError

_MOST_SHAPES = 2
"""Kinds of attention among the layers: with and without a window."""
_NORM_CALLS = ("rms_norm", "add_rms_norm")
_CALLS = ("scale", "add", "multiply_units", "unpack_rows")
_EXPERT_CALLS = ("experts_bytes", "experts_phases")
_KV_CALLS = ("rotate_and_store", "attend_plan", "attend_phase")
"""Kernels that a step calls by their addresses: of the model's dtype, and of that and the norms' or the pool's."""
PHASE_KINDS = (
    *("embed", "norm", "qkv", "rotate", "attend"),
    *("output", "gate_up", "down", "experts", "lm_head", "keep_rows"),
)
"""`PhaseKind` of `src/phase_clock.h`, in order."""
_FAULTS = {1: "token_ids", 2: "rows", 3: "slot_mapping"}


def compile_step(library: Library, parts: DecoderParts) -> NativeStep | None:
    """None if a weight is not packed for native products, or the layers attend in ways that are not planned for."""
    kinds = {layer.params for layer in parts.layers}
    if len(kinds) > _MOST_SHAPES:
        return None
    maps = [parts.lm_head, *(each for layer in parts.layers for each in _maps(layer).values())]
    experts = [layer.mlp for layer in parts.layers if not isinstance(layer.mlp, tuple)]
    if any(_address(each) is None for each in maps) or not all(isinstance(each, NativeExperts) for each in experts):
        return None
    assert isinstance(parts.lm_head, NativeLinear)
    return NativeStep(library, parts, parts.lm_head)


class PhaseClock:
    """What the calling thread spent in phases of each kind, over all steps since the last `take`."""

    def __init__(self) -> None:
        self._spent_ns = (c_int64 * (2 * len(PHASE_KINDS)))()

    @property
    def address(self) -> int:
        """Address at which steps add their times."""
        return ctypes.addressof(self._spent_ns)

    def take(self) -> dict[str, tuple[float, float]]:
        """Seconds at work, and waiting for other threads to finish the phase, by its kind; starts again at nothing."""
        spent_s = [each / 1e9 for each in self._spent_ns]
        self._spent_ns = type(self._spent_ns)()
        return dict(zip(PHASE_KINDS, zip(spent_s[::2], spent_s[1::2], strict=True), strict=True))


class NativeStep:
    """Implements `kernels.compiled_step.CompiledStep`: bit for bit what the native operations compute one by one.

    Each token's result is independent of the others, of chunks as far as `CpuAttention` says, and of the number of
    threads. To be called from one thread at a time; activations belong to it and grow to what was needed.
    """

    __slots__ = (
        *("_call", "_check", "_dtype", "_head", "_head_norms", "_kinds", "_layers", "_parts", "_plans"),
        "clock",
    )

    def __init__(self, library: Library, parts: DecoderParts, head: NativeLinear) -> None:
        self.clock: PhaseClock | None = None
        """Clock of every step; None measures nothing."""
        self._parts, self._head = parts, head
        self._dtype = head.dtype
        self._kinds = tuple(dict.fromkeys(layer.params for layer in parts.layers))
        self._call = library.bind_common("decoder_step", c_void_p, c_void_p, c_void_p)
        self._check = library.bind("attend_check", c_void_p, c_void_p, c_void_p)
        self._head_norms = tuple(
            None if layer.qk_norm is None else HeadNorm.of(layer.qk_norm, self._dtype) for layer in parts.layers
        )
        self._layers = (_Layer * len(parts.layers))(*map(self._layer, parts.layers, self._head_norms))
        kv_dtypes = (kv_dtype for dtype, kv_dtype in NAMES if dtype == self._dtype)
        self._plans = {kv_dtype: self._plan(library, kv_dtype) for kv_dtype in kv_dtypes}

    def _plan(self, library: Library, kv_dtype: torch.dtype) -> _Decoder:
        """For pools of that dtype. Points into the weights and `_layers`."""
        parts, head, name, kv_name = self._parts, self._head, DTYPES[self._dtype], NAMES[self._dtype, kv_dtype]
        norm_name = NORM_NAMES[self._dtype, parts.norm.dtype]
        attended = parts.num_heads * parts.head_dim
        return _Decoder(
            *(library.address(f"{call}_{norm_name}") for call in _NORM_CALLS),
            *(library.address(f"{call}_{name}") for call in _CALLS),
            *(library.address(f"{call}_{kv_name}") for call in _KV_CALLS),
            *(library.address(f"{call}_{name}") for call in _EXPERT_CALLS),
            library.address("product_units"),
            *(ctypes.addressof(self._layers), _data(parts.embedding), parts.norm.data_ptr()),
            *(head.product_address, len(parts.layers), head.num_outputs, head.num_inputs),
            *(attended + 2 * parts.num_kv_heads * parts.head_dim, attended),
            *(parts.intermediate_size, self._dtype.itemsize),
            *(parts.eps, parts.embedding_scale, parts.residual_scale),
        )

    def weight_bytes(self) -> dict[str, int]:
        """Returns, by kind of phase, the bytes of packed weights, scales included, that the phase reads over all
        layers. Experts are left out, since the tokens decide which are read.
        """
        found = Counter(lm_head=_num_bytes(self._parts.lm_head))
        for layer in self._parts.layers:
            found.update({kind: _num_bytes(each) for kind, each in _maps(layer).items()})
        return dict(found)

    def serves(self, kv_cache: torch.Tensor) -> bool:
        """See `CompiledStep.serves`: a pool of the model's own dtype, or quantised."""
        return kv_cache.dtype in self._plans

    def compute(self, step: StepInputs, rotations: Sequence[Rotation], *, projects: bool) -> torch.Tensor:
        """See `CompiledStep.compute`; in the model's dtype."""
        token_ids, _, kv_cache, metadata, rows = step
        self._check_tensors(step, rotations)
        width = self._head.num_outputs if projects else self._head.num_inputs
        computed = torch.empty(len(rows), width, dtype=self._dtype)
        if not len(token_ids):
            return computed
        parts, plan = self._parts, self._plans[kv_cache.dtype]
        kv_layer = kv_cache[:, 0]
        shapes = [
            AttendShape.of(len(token_ids), parts.num_heads, plan.qkv, kv_layer, metadata, kind) for kind in self._kinds
        ]
        addresses = (c_void_p * len(shapes))(*map(ctypes.addressof, shapes))
        for shape in shapes:
            check_lengths(self._check, shape)
        heads = parts.num_heads + 2 * parts.num_kv_heads
        turns = [
            RotateShape.of(len(token_ids), heads, (plan.qkv, parts.head_dim), each, kv_layer) for each in rotations
        ]
        turn_addresses = (c_void_p * len(turns))(*map(ctypes.addressof, turns))
        native = _Step(
            *(token_ids.data_ptr(), rows.data_ptr(), ctypes.addressof(addresses), ctypes.addressof(turn_addresses)),
            kv_cache.data_ptr(),
            *((None, computed.data_ptr()) if projects else (computed.data_ptr(), None)),
            *(len(token_ids), len(rows)),
            *(kv_cache.shape[0] * kv_cache.shape[4], len(shapes), len(turns)),
            kv_cache.stride(1) * kv_cache.element_size(),
            None if self.clock is None else self.clock.address,
        )
        fault = c_int64()
        self._call(ctypes.addressof(plan), ctypes.addressof(native), ctypes.addressof(fault))
        if fault.value:
            raise InternalError(f"{_FAULTS[fault.value]}: out of range in a step of {len(token_ids)} tokens")
        return computed

    def _check_tensors(self, step: StepInputs, rotations: Sequence[Rotation]) -> None:
        """Raises InternalError by name."""
        token_ids, _, kv_cache, metadata, rows = step
        parts, cpu = self._parts, torch.device("cpu")
        dims = Dims(KV=2, L=len(parts.layers), Hkv=parts.num_kv_heads, D=parts.head_dim)
        dims.check("kv_cache", kv_cache, ("N", "L", "KV", "Hkv", "S", "D"), kv_cache.dtype, cpu)
        dims.check("token_ids", token_ids, ("T",), torch.int64, cpu)
        dims.check("rows", rows, ("R",), torch.int64, cpu)
        for rotation in rotations:
            dims.check("cos", rotation.cos, ("T", "D/2"), torch.float32, cpu)
            dims.check("sin", rotation.sin, ("T", "D/2"), torch.float32, cpu)
            dims.check("slot_mapping", rotation.slot_mapping, ("T",), torch.int64, cpu)
        if len(rotations) <= self._last_rotation:
            raise InternalError(f"rotations: {len(rotations)}, of which layers want number {self._last_rotation}")
        dims.check("seq_lens", metadata.seq_lens, ("B",), torch.int32, cpu)
        dims.check("cu_seqlens_q", metadata.cu_seqlens_q, ("B+1",), torch.int32, cpu)
        dims.check("block_tables", metadata.block_tables, ("B", "max_blocks"), torch.int32, cpu)
        if dims["B+1"] != dims["B"] + 1 or 2 * dims["D/2"] != dims["D"]:
            raise InternalError(f"cu_seqlens_q: {dims['B+1']} entries for {dims['B']} seqs; cos: {dims['D/2']} columns")

    @property
    def _last_rotation(self) -> int:
        return max(layer.rotation for layer in self._parts.layers)

    def _layer(self, layer: LayerParts, head_norm: HeadNorm | None) -> _Layer:
        maps = {kind: _address(each) for kind, each in _maps(layer).items()}
        return _Layer(
            *(_data(layer.attention_norm), maps["qkv"], None if head_norm is None else ctypes.addressof(head_norm)),
            *(_data(layer.params.sinks), maps["output"], _data(layer.attention_post_norm), _data(layer.mlp_norm)),
            *(maps.get("gate_up"), maps.get("down")),
            layer.mlp.experts_address if isinstance(layer.mlp, NativeExperts) else None,
            *(_data(layer.mlp_post_norm), self._kinds.index(layer.params), layer.rotation),
        )


def _maps(layer: LayerParts) -> Mapping[str, LinearMap]:
    """Returns a layer's maps, experts left out, by the kind of phase that reads them."""
    mlp = dict(zip(("gate_up", "down"), layer.mlp, strict=True)) if isinstance(layer.mlp, tuple) else {}
    return {"qkv": layer.qkv, "output": layer.output, **mlp}


def _address(linear: LinearMap) -> int | None:
    """Returns the address of the map's `Product`, None for a map without a product."""
    address: int | None = getattr(linear, "product_address", None)
    return address


def _data(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _num_bytes(linear: LinearMap) -> int:
    num_bytes: int = getattr(linear, "num_bytes", 0)
    return num_bytes


class _Layer(ctypes.Structure):
    """`Layer` of `src/decoder.cpp`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "qkv", "head_norm", "sinks", "output")),
        *((name, c_void_p) for name in ("attention_post_norm", "mlp_norm", "gate_up", "down", "experts")),
        ("mlp_post_norm", c_void_p),
        *((name, c_int64) for name in ("attend_slot", "rotate_slot")),
    )


class _Decoder(ctypes.Structure):
    """`Decoder` of `src/decoder.cpp`."""

    _fields_ = (
        *((name, c_void_p) for name in (*_NORM_CALLS, *_CALLS, *_KV_CALLS, *_EXPERT_CALLS, "product_units")),
        *((name, c_void_p) for name in ("layers", "embedding", "norm", "lm_head")),
        *((name, c_int64) for name in ("num_layers", "vocab", "hidden", "qkv", "attended", "intermediate")),
        ("element_bytes", c_int64),
        *((name, c_float) for name in ("eps", "embedding_scale", "residual_scale")),
    )


class _Step(ctypes.Structure):
    """`Step` of `src/decoder.cpp`."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "rows", "attend_shapes", "rotate_shapes")),
        *((name, c_void_p) for name in ("kv", "hidden", "logits")),
        *((name, c_int64) for name in ("num_tokens", "num_rows", "num_slots", "num_attend_shapes")),
        *((name, c_int64) for name in ("num_rotate_shapes", "layer_bytes")),
        ("spent_ns", c_void_p),
    )
