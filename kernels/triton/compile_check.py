"""Builds every Triton kernel ahead of time, with no GPU: `python -m kernels.triton.compile_check`.

Each kernel module's `compile_variants(arch)` is compiled by Triton itself for sm_80, sm_86 and sm_90, and
the machine code's own resource table is read. Fails, naming the variant, on anything kept in local
memory (spills) beyond a few registers, on shared memory or registers beyond a block's limit, on a kernel that does not
compile, and on a kernel that has no variant.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import kernels.triton
from kernels.triton.variant import Variant

SHARED_LIMIT_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
"""What one block may ask for, by architecture (CUDA programming guide, technical specifications)."""
SPILL_LIMIT_BYTES = 128
"""Most spilled bytes of one thread. The fastest prefill on an H100 has 24 bytes of values that wait while a loop runs
(bench/LOG.md), INT4 products on sm_86 have 96."""
_REGISTERS_PER_BLOCK = 65536
_WARP_THREADS = 32
_REGISTER_UNIT = 8
"""Registers of a thread are handed out in multiples of this."""
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Build:
    """What a variant takes on an architecture; `error` is the compiler's last line if the compiler refused."""

    label: str
    arch: int
    registers: int = 0
    """Registers of a thread."""
    shared_bytes: int = 0
    """Shared bytes of a block, as asked for at launch."""
    spilled_bytes: int = 0
    """Bytes of a thread in local memory."""
    num_warps: int = 0
    code: str = ""
    """A hash of the machine code."""
    error: str = ""

    @property
    def faults(self) -> tuple[str, ...]:
        """Reasons why the build must not be shipped."""
        if self.error:
            return (f"does not compile: {self.error}",)
        held = -(-self.registers // _REGISTER_UNIT) * _REGISTER_UNIT * _WARP_THREADS * self.num_warps
        limit = SHARED_LIMIT_BYTES[self.arch]
        complaints = (
            (self.spilled_bytes > SPILL_LIMIT_BYTES, f"spills {self.spilled_bytes} bytes per thread"),
            (self.shared_bytes > limit, f"wants {self.shared_bytes} bytes of shared memory, the limit is {limit}"),
            (held > _REGISTERS_PER_BLOCK, f"wants {held} registers, a block has {_REGISTERS_PER_BLOCK}"),
        )
        return tuple(text for is_so, text in complaints if is_so)

    def __str__(self) -> str:
        verdict = "ok" if not self.faults else "; ".join(self.faults)
        return (
            f"sm_{self.arch} {self.registers:>3} registers {self.shared_bytes:>6} B shared {self.spilled_bytes:>4} B "
            f"spilled {self.num_warps:>2} warps  {self.label}: {verdict}"
        )


def shipped_modules() -> list[str]:
    """Returns the names of every module of the package except this module."""
    own = Path(__file__).stem
    names = (each.name for each in pkgutil.iter_modules(kernels.triton.__path__))
    return [f"kernels.triton.{name}" for name in sorted(names) if name != own]


def variants_of(modules: Iterable[ModuleType], archs: Sequence[int]) -> list[tuple[int, Variant]]:
    """All that is shipped, each with its architecture."""
    return [
        (arch, variant)
        for module in modules
        if hasattr(module, "compile_variants")
        for arch in archs
        for variant in module.compile_variants(arch)
    ]


def kernels_without_variant(modules: Iterable[ModuleType], variants: Iterable[Variant]) -> list[str]:
    """Kernels that nothing would build: in no variant, and called by no other kernel."""
    functions = {function.__name__: function for module in modules for function in _own_kernels(module)}
    built = {variant.kernel.__name__ for variant in variants}
    return sorted(
        name
        for name in functions.keys() - built
        if not any(re.search(rf"\b{name}\(", each.src) for other, each in functions.items() if other != name)
    )


def build(variant: Variant, arch: int) -> Build:
    """Compiles a variant, or takes the variant from Triton's cache."""
    try:
        compiled = triton.compile(variant.source(), GPUTarget("cuda", arch, _WARP_THREADS), variant.options())
    except Exception as error:  # noqa: BLE001 - a build's root: the compiler's errors have no common base
        return Build(variant.label, arch, error=(str(error).strip() or repr(error)).splitlines()[-1])
    cubin = compiled.asm["cubin"]
    registers, spilled_bytes = _read_resources(cubin)
    resources = (registers, compiled.metadata.shared, spilled_bytes, compiled.metadata.num_warps)
    return Build(variant.label, arch, *resources, hashlib.sha256(cubin).hexdigest())


def build_all(variants: Sequence[tuple[int, Variant]], jobs: int) -> Iterator[Build]:
    """In `jobs` processes, in the order given, each as soon as it is there. Forked: variants cannot be pickled."""
    global _shared_variants  # noqa: PLW0603
    _shared_variants = variants
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_build_shared, range(len(variants)))


_shared_variants: Sequence[tuple[int, Variant]] = ()


def _build_shared(index: int) -> Build:
    arch, variant = _shared_variants[index]
    return build(variant, arch)


def _read_resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and its bytes of local memory: frame and static."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [tuple(map(int, numbers)) for numbers in _RESOURCES.findall(report)]
    return max(registers for registers, _, _ in found), sum(stack + local for _, stack, local in found)


def _own_kernels(module: ModuleType) -> list[JITFunction]:
    functions = (each for each in vars(module).values() if isinstance(each, JITFunction))
    return [function for function in functions if function.fn.__module__ == module.__name__]


def main() -> int:
    """Prints a line per build; exit code 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="only these (every module of kernels.triton)")
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=sorted(SHARED_LIMIT_BYTES), default=sorted(SHARED_LIMIT_BYTES)
    )
    parser.add_argument("--match", default="", help="only variants whose label has this regular expression")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, help="where compiled kernels are kept (Triton's own place)")
    args = parser.parse_args()
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    if args.cache is not None:
        knobs.cache.dir = str(args.cache)
    began_s = time.monotonic()
    modules = [importlib.import_module(name) for name in args.modules or shipped_modules()]
    every = variants_of(modules, args.arch)
    missing = kernels_without_variant(modules, [variant for _, variant in every])
    print(*(f"{name}: has no variant\n" for name in missing), sep="", end="")
    count, faulty = 0, len(missing)
    for each in build_all([pair for pair in every if re.search(args.match, pair[1].label)], args.jobs):
        print(each, flush=True)
        count, faulty = count + 1, faulty + bool(each.faults)
    print(f"{count} builds in {time.monotonic() - began_s:.0f} s, {faulty} with faults")
    return 1 if faulty or not count else 0


if __name__ == "__main__":
    sys.exit(main())
