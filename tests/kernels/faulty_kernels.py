"""Kernels with one fault each, for the test that the compile check can fail."""

import triton
import triton.language as tl

from kernels.triton.variant import Variant


@triton.jit
def product_kernel(a, b, out, steps, num_rows: tl.constexpr, num_columns: tl.constexpr, depth: tl.constexpr):
    rows, columns, inner = tl.arange(0, num_rows), tl.arange(0, num_columns), tl.arange(0, depth)
    total = tl.zeros((num_rows, num_columns), tl.float32)
    for step in range(steps):
        left = tl.load(a + rows[:, None] * depth + inner[None, :] + step * num_rows * depth)
        right = tl.load(b + inner[:, None] * num_columns + columns[None, :] + step * depth * num_columns)
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * num_columns + columns[None, :], total)


@triton.jit
def ill_typed_kernel(a, num_columns: tl.constexpr):
    tl.store(a + tl.arange(0, num_columns), tl.zeros((2 * num_columns,), tl.float32))


@triton.jit
def helper(x):
    return x + 1


@triton.jit
def forgotten_kernel(a):
    tl.store(a, helper(tl.load(a)))


def compile_variants(arch):
    types = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "steps": "i32"}
    tiles = {
        "sound": ({"num_rows": 64, "num_columns": 64, "depth": 32}, 4, 2),
        "spills": ({"num_rows": 256, "num_columns": 256, "depth": 32}, 4, 2),
        "too deep": ({"num_rows": 128, "num_columns": 128, "depth": 128}, 8, 6),
    }
    for label, (tile, num_warps, num_stages) in tiles.items():
        yield Variant(product_kernel, types, tile, num_warps, label, num_stages)
    yield Variant(ill_typed_kernel, {"a": "*fp32"}, {"num_columns": 32}, 4, "ill-typed")
