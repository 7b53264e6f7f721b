"""Finds tiles for the Triton attention kernels on the GPU at hand: `python -m bench.tune --device cuda`.

For each row of `kernels/triton/configs/<family>.json`: builds the row's plainest variant with every
candidate, times those that pass the compile check on the row's shapes, and takes the fastest with which
all variants of the row pass it. Rewrites the table; a row changes only for a gain of 2 %. Without a
GPU it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from triton.runtime.errors import OutOfResources

from bench.kernels.attention_batch import AttentionBatch
from bench.kernels.shapes import AttentionShape, chunk_shape, decode_shape, prompt_shape
from bench.support.timing import time_s
from kernels.triton import configs, decode, prefill
from kernels.triton.attention import TritonAttention
from kernels.triton.compile_check import build_all
from kernels.triton.configs import AttentionKernel, KernelConfig, ShapeClass, arch_of, family_of, shipped_configs
from kernels.triton.variant import POINTERS, Variant

CONFIGS = Path(configs.__file__).parent / "configs"
_MODULES: dict[AttentionKernel, ModuleType] = {"prefill": prefill, "decode": decode}
_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_HEADS = {64: (32, 8, 64), 128: (32, 8, 128), 256: (16, 8, 256)}
_GAIN, _BUDGET_S = 1.02, 0.1


def candidates(kernel: AttentionKernel) -> list[KernelConfig]:
    """All that is tried; a decode tile's rows are the heads of one group, so it is no taller than it must be."""
    keys = (16, 32, 64, 128)
    if kernel == "prefill":
        return [KernelConfig(*each) for each in product((16, 32, 64, 128), keys, (4, 8), (2, 3, 4))]
    return [KernelConfig(*each) for each in product((16,), keys, (1, 2, 4, 8), (2, 3, 4, 5))]


def shapes(kernel: AttentionKernel, head_dim: int) -> tuple[AttentionShape, ...]:
    """What a row is timed on."""
    heads = _HEADS[head_dim]
    if kernel == "prefill":
        return (prompt_shape(1, 4096, heads), prompt_shape(16, 256, heads), chunk_shape(1024, 7168, heads))
    return tuple(decode_shape(batch, context, heads) for batch, context in ((1, 8192), (32, 2048), (128, 1024)))


@contextmanager
def forced(kernel: AttentionKernel, config: KernelConfig) -> Iterator[None]:
    """The kernel's launches and variants take `config`, whatever the table says."""
    with patch.object(_MODULES[kernel], "attention_config", lambda *_: config):
        yield


def variants_of_row(kernel: AttentionKernel, row: ShapeClass, config: KernelConfig, arch: int) -> list[Variant]:
    """Every shipped variant that the row decides, with `config` instead of the row's own."""
    narrower = max((width for width in _HEADS if width < row.head_dim), default=0)
    pointers = {name for dtype, name in POINTERS.items() if dtype.itemsize == row.element_bytes}
    with forced(kernel, config):
        return [
            variant
            for variant in _MODULES[kernel].compile_variants(arch)
            if variant.signature.get("q") in pointers and narrower < variant.constexprs["HEAD_DIM"] <= row.head_dim
        ]


def sound_candidates(kernel: AttentionKernel, row: ShapeClass, arch: int, jobs: int) -> list[KernelConfig]:
    """Those whose plainest variant passes the compile check for `arch`, each machine code once.

    Where Triton finds nothing to pipeline, candidates that differ in stages alone are one kernel.
    """
    tried = candidates(kernel)
    plainest = [
        next(each for each in variants_of_row(kernel, row, config, arch) if each.constexprs["HEAD_DIM"] == row.head_dim)
        for config in tried
    ]
    built = build_all([(arch, variant) for variant in plainest], jobs)
    sound: dict[str, KernelConfig] = {}
    for config, made in zip(tried, built, strict=True):
        if not made.faults:
            sound.setdefault(made.code, config)
    return list(sound.values())


def is_sound(kernel: AttentionKernel, row: ShapeClass, config: KernelConfig, arch: int, jobs: int) -> bool:
    """Whether every variant that the row decides passes the compile check for `arch`."""
    variants = variants_of_row(kernel, row, config, arch)
    return not any(build.faults for build in build_all([(arch, variant) for variant in variants], jobs))


def score_s(kernel: AttentionKernel, config: KernelConfig, batches: Sequence[AttentionBatch]) -> float:
    """Geometric mean of the times on `batches`; infinite where the device refuses the launch."""
    try:
        with forced(kernel, config):
            times_s = [time_s(batch.calls(TritonAttention()), batch.device, _BUDGET_S) for batch in batches]
    except OutOfResources:
        return math.inf
    return math.exp(math.fsum(map(math.log, times_s)) / len(times_s))


def tuned(kernel: AttentionKernel, row: ShapeClass, device: torch.device, jobs: int) -> KernelConfig:
    """The best for one row: its own, unless another is faster by `_GAIN`."""
    arch = arch_of(device)
    own = shipped_configs(kernel, arch)[row]
    batches = [AttentionBatch(shape, _DTYPES[row.element_bytes], device) for shape in shapes(kernel, row.head_dim)]
    own_s = score_s(kernel, own, batches)
    found = {config: score_s(kernel, config, batches) for config in sound_candidates(kernel, row, arch, jobs)}
    ranked = sorted(found, key=found.__getitem__)
    best = next((config for config in ranked if is_sound(kernel, row, config, arch, jobs)), own)
    gain = own_s / found.get(best, own_s)
    print(f"{kernel} {row}: {own} {own_s * 1e6:.1f} µs; best {best}, {gain:.3f} times as fast", flush=True)
    return best if gain >= _GAIN else own


def render(table: Mapping[AttentionKernel, Mapping[ShapeClass, KernelConfig]]) -> str:
    """The file's text: a row a line, 16-bit elements first."""
    kernels = []
    for kernel, rows in table.items():
        ordered = sorted(rows.items(), key=lambda row: (row[0].element_bytes, row[0].head_dim))
        lines = ",\n".join(f"    {json.dumps(asdict(shape) | asdict(config))}" for shape, config in ordered)
        kernels.append(f'  "{kernel}": [\n{lines}\n  ]')
    return "{\n" + ",\n".join(kernels) + "\n}\n"


def main() -> int:
    """Tunes every row of this device's family, or those of `--head-dim`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--head-dim", type=int, nargs="+", choices=sorted(_HEADS), default=sorted(_HEADS))
    parser.add_argument("--element-bytes", type=int, nargs="+", choices=sorted(_DTYPES), default=sorted(_DTYPES))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not tuned: no GPU")
        return 0
    device, jobs = torch.device(args.device), len(os.sched_getaffinity(0))
    arch = arch_of(device)
    with torch.inference_mode():
        table = {
            kernel: {
                row: tuned(kernel, row, device, jobs)
                if row.head_dim in args.head_dim and row.element_bytes in args.element_bytes
                else own
                for row, own in shipped_configs(kernel, arch).items()
            }
            for kernel in _MODULES
        }
    (CONFIGS / f"{family_of(arch)}.json").write_text(render(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
