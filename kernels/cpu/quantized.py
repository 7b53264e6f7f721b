"""Quantised weights on the CPU: laid out once as `src/quantized_forms.h` reads them.

The arithmetic is one for all forms: their values are exact in bfloat16, so are products with bfloat16 activations in
float32; nothing is rounded but the sums. Activations are never quantised.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.cpu.library import Library
from kernels.cpu.linear import MEMORY, NativeLinear, Product, check_outputs
from kernels.gates import Gate
from kernels.quantized import HALF_BYTES, QuantForm, QuantizedWeight
from kernels.spec import Dims

_FORMS = {QuantForm.INT8: 16, QuantForm.INT4: 17, QuantForm.FP8: 18, QuantForm.FP4: 19}
"""Number of each form, as `product::QuantizedForm` numbers them."""
_HALF_SCALES = 64
_BLOCK = 16
"""Outputs of a block; two make a unit."""
_STRETCH, _SHORT_STRETCH = 32, 16
"""Inputs of one partial sum: a group is of a number of them."""
_ZERO = 8
"""The unsigned INT4 value that the kernels take for 0."""


def can_keep(weight: QuantizedWeight) -> bool:
    """Whether there are products for its groups and sizes."""
    return weight.group % (_SHORT_STRETCH if weight.form in {QuantForm.INT8, QuantForm.FP4} else _STRETCH) == 0


def open_quantized(
    library: Library, weight: QuantizedWeight, bias: torch.Tensor | None, gate: Gate | None
) -> NativeLinear:
    """The map of a weight that `can_keep`, as `open_linear` makes that of a plain one.

    Raises InternalError, by name, if `bias` or the rows do not fit.
    """
    if weight.form is QuantForm.FP4 and weight.group % _STRETCH:
        weight = weight.as_int8()
    gated, dims = gate is not None, Dims(out=weight.num_outputs)
    check_outputs(dims, bias, weight.dtype, torch.device("cpu"), is_gated=gated)
    offsets = weight.offsets
    if offsets is not None and weight.form is QuantForm.INT4:
        offsets = (offsets.double() + _ZERO * weight.scales.double()).float()
    if offsets is not None and not offsets.count_nonzero():
        offsets = None
    scales = weight.scales.half()
    form = _FORMS[weight.form]
    if torch.equal(scales.float(), weight.scales):
        form += _HALF_SCALES
    else:
        scales = weight.scales
    product = Product.of(form, weight.num_inputs, weight.num_outputs, gate, weight.group)
    packed = _in_memory(_in_units(_words(weight), gated=gated))
    product.packed = packed.data_ptr()
    held = [packed, _in_memory(_in_units(scales, gated=gated))]
    product.scales = held[-1].data_ptr()
    if offsets is not None:
        held.append(_in_memory(_in_units(offsets, gated=gated)))
        product.offsets = held[-1].data_ptr()
    return NativeLinear(library, product, held, bias, weight.dtype)


def _words(weight: QuantizedWeight) -> torch.Tensor:
    """`[out, in / 4 or in / 8]` int32, each with the values of neighbouring inputs, as the kernels take them apart."""
    rows = len(weight.values)
    values = weight.values.contiguous().view(torch.uint8).view(rows, -1, 4)  # [out, words, 4]
    if weight.form is QuantForm.FP8:
        values = values[..., [0, 2, 1, 3]]
    if weight.form in HALF_BYTES:
        even, odd = values & 0x0F, values >> 4
        halves = torch.cat((even, odd), dim=2)  # [out, words, 8]: the inputs 0, 2, 4, 6, 1, 3, 5, 7
        values = halves[..., 0::2] | halves[..., 1::2] << 4  # [out, words, 4]
    return values.contiguous().view(torch.int32).view(rows, -1)


def _in_units(rows: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """`[out, C]` → `[units, C, 2, 16]`, filled up with zeros: a unit is two blocks, or one of gates and one of ups."""
    parts, columns = (2, rows.shape[1]) if gated else (1, rows.shape[1])
    parted = rows.reshape(parts, -1, columns)
    outputs = _BLOCK if gated else 2 * _BLOCK
    parted = F.pad(parted, (0, 0, 0, -parted.shape[1] % outputs))
    blocks = parted.view(parts, -1, outputs // _BLOCK, _BLOCK, columns)  # [parts, units, blocks, 16, C]
    return blocks.permute(1, 4, 0, 2, 3).reshape(-1, columns, 2, _BLOCK)


def _in_memory(source: torch.Tensor) -> torch.Tensor:
    """A copy in the memory of packed weights."""
    packed = MEMORY.take(source.nbytes).view(source.dtype).view(source.shape)
    return packed.copy_(source)
