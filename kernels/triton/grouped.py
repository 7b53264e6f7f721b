"""Linear maps of quantised experts: one kernel, whose programs find on the device which expert's rows are theirs.

The product is that of `kernels.triton.quantized`. Rows of an expert are cut into tiles as those of a step are. How many
tiles there are is known on the device alone: as many programs start as there may be, and those beyond the last end at
once. So the host waits for nothing, and a graph can hold the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

from kernels.grouped import ExpertRows
from kernels.quantized import HALF_BYTES
from kernels.triton.configs import arch_of
from kernels.triton.quantized import CODES, FORMS, HeldWeight, TokenTile, constants, tiles_of, types_of, variant
from kernels.triton.quantized_kernels import quantized_linear_kernel
from kernels.triton.variant import POINTERS, Variant, launch_options

_BUILT_EXPERTS = 32
_TILE_TOKENS = (8, 32, 128)
"""Those of the tiles of a step that serve an expert's rows: few, so that the steps of a warm-up meet all."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedLinear:
    """Weights of X experts in their form, one below the other; implements `kernels.grouped.GroupedMap`."""

    weight: HeldWeight  # [X * out, in]
    bias: torch.Tensor | None  # [X, out]
    num_experts: int
    waits_for_device: bool = False

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """See `GroupedMap`. A row's last bits depend on M alone."""
        weight = self.weight
        weight.check(x)
        num_outputs, row_bytes = weight.values.shape[0] // self.num_experts, weight.values.shape[1]
        out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
        if not out.numel():
            return out
        sizes = _tile_for(len(x), self.num_experts, x.dtype, arch_of(x.device))
        tile = constants(sizes, weight.form, weight.group, weight.num_inputs, weight.pair)
        most_tiles = (len(x) + min(self.num_experts, len(x)) * (sizes.block_tokens - 1)) // sizes.block_tokens
        quantized_linear_kernel[(triton.cdiv(num_outputs, sizes.block_outputs), most_tiles, 1)](
            *(*weight.operands(x), out if self.bias is None else self.bias, out, rows.ends),
            *(len(x), num_outputs, row_bytes, x.stride(0), weight.scales.shape[1]),
            *(triton.cdiv(row_bytes, tile["WIDTH"]) * tile["WIDTH"], self.num_experts),
            **weight.meaning(),
            HAS_BIAS=self.bias is not None,
            EXPERTS=triton.next_power_of_2(self.num_experts),
            **tile,
            **launch_options(sizes.num_warps, sizes.num_stages),
        )
        return out


def _tile_for(num_rows: int, num_experts: int, dtype: torch.dtype, arch: int) -> TokenTile:
    """The least tile that holds as many rows as an expert has on average, or the largest."""
    tiles = [each for each in tiles_of(dtype, arch) if each.block_tokens in _TILE_TOKENS]
    return next((each for each in tiles if num_rows <= each.block_tokens * num_experts), tiles[-1])


def compile_variants(arch: int) -> Iterator[Variant]:
    """Each form in each tile."""
    for dtype in (torch.bfloat16, torch.float32):
        for form, group, has_offsets in FORMS:
            pair = group if form in HALF_BYTES else 0
            for sizes in (each for each in tiles_of(dtype, arch) if each.block_tokens in _TILE_TOKENS):
                yield variant(
                    quantized_linear_kernel,
                    {**types_of(form, group, dtype), "ends": "*i32"},
                    {
                        "FORM": CODES[form],
                        "HAS_OFFSETS": has_offsets,
                        "PAIR": pair,
                        **constants(sizes, form, group, 4096, pair),
                        "HAS_BIAS": True,
                        "EXPERTS": _BUILT_EXPERTS,
                    },
                    (sizes.num_warps, sizes.num_stages),
                    f"grouped {POINTERS[dtype][1:]} {form} by {group} T={sizes.block_tokens}",
                )
