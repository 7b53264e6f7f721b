"""Linear maps on the CPU: each weight packed once, in the order in which `src/product_panel.h` or AMX tiles read it.

A packed weight takes the plain one's place; only its owner knows the layout. A token's result is the same to the bit
whatever tokens are with it and however many threads compute. Float32 sums are cut into parts of 64 inputs, so that
they err no more than plain torch's: tokens are to equal those.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch

from kernels.cpu.library import Library
from kernels.cpu.packed_memory import PackedMemory
from kernels.gates import Activation, ClampedSwiglu, Gate
from kernels.operations import LinearMap
from kernels.spec import Dims
from tandem.errors import InternalError

FORMS = {torch.float32: (0, "f32"), torch.bfloat16: (1, "bf16"), torch.float16: (2, "f16")}
"""Number of each plain form, as `product::Form` has it, and how the kernels' names call it."""
MEMORY = PackedMemory()
"""Memory of all packed weights."""

_GATES = {None: 0, Activation.SILU: 1, Activation.GELU_TANH: 2}
_CLAMPED_SWIGLU = 3
"""Number of each activation, as `Gate` of `src/gates.h` numbers them."""
_SHORT_TOKENS = 16
_SHORT_BYTES = 1 << 22
"""The most tokens and bytes of weights for which a call keeps the GIL: the call returns within a fifth of a
millisecond."""


class Product(ctypes.Structure):
    """`Product` of `src/product_weight.h`, field by field."""

    _fields_ = (
        *((name, c_int64) for name in ("form", "inputs", "outputs", "gated", "group")),
        *((name, c_void_p) for name in ("packed", "scales", "offsets", "bias")),
        *((name, c_float) for name in ("alpha", "limit")),
        ("wide", c_int64),
    )

    @classmethod
    def of(cls, form: int, num_inputs: int, num_rows: int, gate: Gate | None, group: int = 0) -> Product:
        """Builds the product of a weight `[num_rows, num_inputs]`, gates before ups if there is a `gate`; its pointers
        are empty.
        """
        outputs = num_rows if gate is None else num_rows // 2
        if isinstance(gate, ClampedSwiglu):
            return cls(form, num_inputs, outputs, _CLAMPED_SWIGLU, group, alpha=gate.alpha, limit=gate.limit)
        return cls(form, num_inputs, outputs, _GATES[gate], group)


def open_linear(
    library: Library, weight: torch.Tensor, bias: torch.Tensor | None, gate: Gate | None, *, is_wide: bool = False
) -> NativeLinear | None:
    """The map for `weight` `[out, in]` and `bias` `[out]`; with a `gate` of activated gates times ups, rounded once.
    Sums of one that `is_wide` stay float32.

    None where the weight's dtype is none of `FORMS`. Raises InternalError if weight and bias do not fit.
    """
    dims = Dims()
    dims.check("weight", weight, ("out", "in"), weight.dtype, weight.device)
    check_outputs(dims, bias, weight.dtype, weight.device, is_gated=gate is not None)
    if weight.dtype not in FORMS:
        return None
    form, suffix = FORMS[weight.dtype]
    product = Product.of(form, weight.shape[1], weight.shape[0], gate)
    product.wide = is_wide
    address, num_bytes = ctypes.addressof(product), c_int64()
    library.bind("packed_bytes", c_void_p, c_void_p)(address, ctypes.addressof(num_bytes))
    packed = MEMORY.take(num_bytes.value)
    product.packed = packed.data_ptr()
    pack = library.bind(f"pack_{suffix}", c_void_p, c_void_p, c_int64, c_void_p)
    pack(address, weight.data_ptr(), weight.stride(0), packed.data_ptr())
    return NativeLinear(library, product, (packed,), bias, weight.dtype)


def check_outputs(
    dims: Dims, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device, *, is_gated: bool
) -> None:
    """Checks the bias of a weight with `dims["out"]` rows, and that gates and ups are equally many."""
    if bias is not None:
        dims.check("bias", bias, ("out",), dtype, device)
    if is_gated and dims["out"] % 2:
        raise InternalError(f"weight: {dims['out']} rows are not as many of gate and up")


def open_embedding(library: Library, linear: LinearMap) -> PackedEmbedding | None:
    """The rows of the weight of `linear`; None if it is not a packed plain one."""
    return PackedEmbedding(library, linear) if isinstance(linear, NativeLinear) and linear.is_plain else None


class NativeLinear:
    """A packed weight and what it needs. A token's result does not depend on the others."""

    __slots__ = (
        *("_bias", "_long", "_num_inputs", "_num_outputs", "_packed", "_product", "_short", "_short_tokens"),
        *("_out_dtype", "dtype", "product_address"),
    )

    def __init__(
        self,
        library: Library,
        product: Product,
        packed: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """`product` points into `packed`, all of whose memory it reads; `dtype` of the activations and `bias`."""
        self._num_inputs, self._num_outputs = int(product.inputs), int(product.outputs)
        self.dtype = dtype
        """Dtype of the activations."""
        self._out_dtype = torch.float32 if product.wide else dtype
        self._product, self._packed = product, packed
        self._bias = None if bias is None else bias.contiguous()
        product.bias = None if self._bias is None else self._bias.data_ptr()
        self.product_address = ctypes.addressof(product)
        """Address of the struct that native code multiplies by; the struct lives as long as this object."""
        argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p)
        name = f"linear_{FORMS[dtype][1]}"
        self._short, self._long = (library.bind(name, *argtypes, keeps_gil=keep) for keep in (True, False))
        self._short_tokens = _SHORT_TOKENS if self.num_bytes <= _SHORT_BYTES else 0

    @property
    def num_inputs(self) -> int:
        """Number of inputs of a token."""
        return self._num_inputs

    @property
    def num_outputs(self) -> int:
        """Number of outputs of a token."""
        return self._num_outputs

    @property
    def is_plain(self) -> bool:
        """Whether the weight is neither quantised nor of gates and ups."""
        return not (self._product.group or self._product.gated)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight with its scales and offsets."""
        return sum(each.nbytes for each in self._packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X `[T, in]`, rows contiguous → `[T, out]`. Sums in float32, rounded once unless wide.

        Raises InternalError by name.
        """
        shape = x.shape
        if (
            len(shape) != 2
            or shape[1] != self._num_inputs
            or x.dtype is not self.dtype
            or x.stride()[1] != 1
            or not x.is_cpu
        ):
            Dims(**{"in": self._num_inputs}).check("x", x, ("T", "in"), self.dtype, torch.device("cpu"))
            raise InternalError(f"x: {list(shape)} cannot be multiplied")
        tokens = shape[0]
        out = torch.empty(tokens, self._num_outputs, dtype=self._out_dtype)
        call = self._short if tokens <= self._short_tokens else self._long
        call(self.product_address, x.data_ptr(), x.stride()[0], tokens, out.data_ptr())
        return out


class PackedEmbedding:
    """Implements `kernels.operations.Embedding`: the rows of a packed plain weight, so that none is held twice."""

    __slots__ = ("_linear", "_unpack")

    def __init__(self, library: Library, linear: NativeLinear) -> None:
        self._linear = linear
        name = f"unpack_rows_{FORMS[linear.dtype][1]}"
        self._unpack = library.bind(name, c_void_p, c_void_p, c_int64, c_void_p)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Ids `[T]` int64, contiguous → rows `[T, E]`. Raises InternalError by name."""
        linear = self._linear
        Dims().check("token_ids", token_ids, ("T",), torch.int64, torch.device("cpu"))
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < linear.num_outputs:
            raise InternalError(f"token_ids: out of range of {linear.num_outputs} rows")
        rows = torch.empty(len(token_ids), linear.num_inputs, dtype=linear.dtype)
        self._unpack(linear.product_address, token_ids.data_ptr(), len(token_ids), rows.data_ptr())
        return rows
