"""One compilation of a Triton kernel, written down so that it can be built where there is no GPU.

Each kernel module lists its own with `compile_variants(arch)`; `arch` is 80 for sm_80, 90 for
sm_90. A variant has the types and alignments that a launch with real tensors would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton.compiler import ASTSource

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
"""Triton's name of a pointer to each dtype that the kernels take."""

FP_FUSION = {"enable_fp_fusion": True}
"""a * b + c in one rounding; Triton 3.9 warns where it is not said."""


def launch_options(num_warps: int, num_stages: int = 1) -> dict[str, Any]:
    """What every launch passes, and every build ahead of time: options left to a default are another binary."""
    return {"num_warps": num_warps, "num_stages": num_stages, **FP_FUSION}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with everything that its machine code depends on, except the device."""

    kernel: Any
    """What `triton.jit` returned."""
    signature: Mapping[str, str]
    """Type of run-time arguments by name: `*bf16`, `*i32`, `i64`, `fp32`; those left out are `i32`."""
    constexprs: Mapping[str, object]
    """Value of each compile-time argument by name."""
    num_warps: int
    label: str
    """Name of the variant in reports: `prefill bf16 D=128 64x64`."""
    num_stages: int = 1
    aligned: frozenset[str] = frozenset()
    """Run-time integers that are multiples of 16 in every launch that matters; pointers always are, but for those that
    the kernel does not specialize on."""

    def source(self) -> ASTSource:
        """For `triton.compile(source, target, options)`."""
        names = self.kernel.arg_names
        signature = {
            name: "constexpr" if name in self.constexprs else self.signature.get(name, "i32") for name in names
        }
        sliced = self.kernel.do_not_specialize_on_alignment
        attrs = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name in self.aligned or (signature[name].startswith("*") and name not in sliced)
        }
        return ASTSource(self.kernel, signature, dict(self.constexprs), attrs)

    def options(self) -> dict[str, object]:
        """Compile options, as a launch gives them."""
        return launch_options(self.num_warps, self.num_stages)
