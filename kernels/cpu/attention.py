"""The `cpu` attention: paged decode and prefill in C++ (`src/attention.cpp`) that read blocks in place.

A layer's call is checked against what the step's first layer brought, a microsecond; lengths and
tables are checked in full once per step. Knows nothing of how a batch is cut into work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p

import torch

from kernels.attention import AttentionMetadata, AttentionParams
from kernels.cpu.library import Library
from kernels.cpu.operations import COMPUTED, NAMES
from kernels.spec import Dims, check_attend
from tandem.errors import InternalError

_SHORT_PAIRS = 8192
"""The most pairs of query and key for which a call keeps the GIL: the call returns within a tenth of a millisecond."""

_FAULTS = {1: "cu_seqlens_q", 2: "seq_lens", 3: "block_tables"}
"""What `tandem_attend_check` found."""


class CpuAttention:
    """Implements `kernels.attention.AttentionBackend` for float32, bfloat16 and float16 on the CPU.

    A seq's result is the same to the bit whatever else is in the batch and however many threads
    compute it; in seqs of two tokens or more, also wherever the prompt is cut into chunks. A decode
    step (one token) adds in another order than a chunk, so the two agree but for rounding. On
    bfloat16, the softmax's weights are rounded to bfloat16 where the processor multiplies those, in chunks
    and, over bfloat16 KV, in decode steps. Quantized KV is multiplied by its scales in float32; but chunks on
    bfloat16 round it to bfloat16 first, and decode steps there read int8 as integers (`src/attention_bytes.h`).

    Keeps the last step's metadata, which its layers share, to check it once. Scratch memory belongs to
    each computing thread, grows to what was needed (about a megabyte) and stays. For one thread.
    """

    __slots__ = ("_check", "_long", "_short", "_step")

    def __init__(self, library: Library) -> None:
        pointers = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
        self._check = library.bind("attend_check", c_void_p, c_void_p, c_void_p)
        self._short, self._long = (
            {name: library.bind(f"attend_{name}", *pointers, keeps_gil=keeps) for name in NAMES.values()}
            for keeps in (True, False)
        )
        self._step: _Step | None = None

    name = "cpu"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. q `[T, H, D]` → `[T, H, D]`; reads K and V from `kv_layer` alone.

        Raises InternalError for shapes, dtypes, strides, lengths or tables that do not fit.
        """
        step = self._step
        if step is None or not step.fits(q, kv_layer, metadata, params):
            step = self._step = self._open_step(q, kv_layer, metadata, params)
        out = torch.empty(step.q_shape, dtype=step.dtype)
        calls = self._short if step.is_short else self._long
        calls[step.name](q.data_ptr(), kv_layer.data_ptr(), out.data_ptr(), step.address, _address_of_sinks(q, params))
        return out

    def _open_step(
        self, q: torch.Tensor, kv_layer: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> _Step:
        """Checks all arguments; raises InternalError by name."""
        check_attend(q, kv_layer, metadata, params)
        if (q.dtype, kv_layer.dtype) not in NAMES or not q.is_cpu:
            raise InternalError(f"q: {q.dtype} on {q.device}; the native kernels compute {COMPUTED} on CPUs")
        if q.shape[1] > 1 and q.stride(1) != q.shape[2]:
            raise InternalError(f"q: heads have stride {q.stride(1)}, expected {q.shape[2]}")
        if params.scale <= 0:
            raise InternalError(f"params: scale is {params.scale}, expected above 0")
        step = _Step(q, kv_layer, metadata, params)
        check_lengths(self._check, step.shape)
        return step


def _address_of_sinks(q: torch.Tensor, params: AttentionParams) -> int | None:
    """Returns the address of the layer's sinks. They are checked for each layer, since each layer has its own."""
    if params.sinks is None:
        return None
    Dims(H=q.shape[1]).check("sinks", params.sinks, ("H",), torch.float32, q.device)
    return params.sinks.data_ptr()


class AttendShape(ctypes.Structure):
    """`AttendShape` of `src/attention_batch.h`, field by field."""

    _fields_ = (
        *((name, c_int64) for name in ("num_seqs", "num_tokens", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("block_size", "num_blocks", "max_blocks", "q_token", "table_seq")),
        *((name, c_int64) for name in ("kv_block", "kv_side", "kv_head", "kv_slot", "window")),
        *((name, c_void_p) for name in ("starts", "seq_lens", "block_tables")),
        *((name, c_float) for name in ("scale", "soft_cap")),
    )

    @classmethod
    def of(
        cls,
        num_tokens: int,
        num_heads: int,
        q_stride: int,
        kv_layer: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> AttendShape:
        """Builds the shape of a call: queries `q_stride` elements apart, over pools like `kv_layer`. The metadata must
        outlive the shape.
        """
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        tables = metadata.block_tables
        return cls(
            *(len(metadata.seq_lens), num_tokens, num_heads, num_kv_heads, head_dim),
            *(block_size, num_blocks, tables.shape[1], q_stride, tables.stride(0)),
            *(*kv_layer.stride()[:4], params.sliding_window or 0),
            *(metadata.cu_seqlens_q.data_ptr(), metadata.seq_lens.data_ptr(), tables.data_ptr()),
            *(params.scale, params.soft_cap or 0.0),
        )


def check_lengths(check: Callable[..., None], shape: AttendShape) -> None:
    """Asks `tandem_attend_check` of any tier. Raises InternalError naming the first wrong length or table."""
    fault, seq = c_int64(), c_int64()
    check(ctypes.addressof(shape), ctypes.addressof(fault), ctypes.addressof(seq))
    if fault.value:
        raise InternalError(f"{_FAULTS[fault.value]}: wrong for seq {seq.value} of {shape.num_seqs}")


class _Step:
    """Checked arguments of one step, and the struct made of them.

    `address` points into `shape`, whose pointers point into the metadata: all live as long as this does.
    """

    __slots__ = (
        *("_kv_dtype", "_kv_shape", "_kv_strides", "_metadata", "_params", "_q_strides"),
        *("address", "dtype", "is_short", "name", "q_shape", "shape"),
    )

    def __init__(
        self, q: torch.Tensor, kv_layer: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> None:
        self._metadata, self._params = metadata, params
        self._kv_shape, self._kv_strides = kv_layer.shape, kv_layer.stride()
        self.q_shape, self._q_strides = q.shape, q.stride()
        self.dtype, self._kv_dtype = q.dtype, kv_layer.dtype
        self.name = NAMES[q.dtype, kv_layer.dtype]
        lens = zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
        self.is_short = sum(query_len * seq_len for query_len, seq_len in lens) <= _SHORT_PAIRS
        self.shape = AttendShape.of(q.shape[0], q.shape[1], q.stride(0), kv_layer, metadata, params)
        self.address = ctypes.addressof(self.shape)

    def fits(
        self, q: torch.Tensor, kv_layer: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> bool:
        """Whether the arguments belong to another layer of the same step."""
        return (
            self._metadata is metadata
            and (self._params is params or self._params == params)
            and q.shape == self.q_shape
            and q.stride() == self._q_strides
            and q.dtype is self.dtype
            and kv_layer.shape == self._kv_shape
            and kv_layer.stride() == self._kv_strides
            and kv_layer.dtype is self._kv_dtype
        )
