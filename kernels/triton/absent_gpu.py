"""Compiles for a GPU that is not there: a launch goes as far as Triton's cache of compiled kernels, and is not made.

Triton itself names the cache's entries, by the types, alignments and options of a real launch, by the architecture and
by its own files; nothing of the machine is in them. So the same Triton on such a GPU finds what was compiled here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.triton import stand_in
from tandem.errors import ConfigError

_WARP_THREADS = 32


class _AbsentGpu:
    """What Triton asks its driver for until a kernel is compiled."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, _WARP_THREADS)

    def get_current_device(self) -> int:
        """Returns the architecture as the device's number: a kernel keeps its compilations by device."""
        return self._arch

    def get_current_stream(self, _: int) -> int:
        return 0


def compile_instead(cache: Path) -> Counter[tuple[str, bool]]:
    """Until the process ends, its launches are compiled into `cache`, for `pretend`'s GPU, and not made.

    What they would have written is zero. Returns, and keeps up to date, how many kernels were asked for, by name and by
    whether they were there already. Raises ConfigError where kernels are interpreted.
    """
    if knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET", "is set: nothing would be compiled")
    knobs.cache.dir = str(cache.absolute())  # it is in the entries
    found: Counter[tuple[str, bool]] = Counter()
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(kernel, *args, grid=grid, warmup=True, **options)

    def count(*, src: Any, cache_hit: bool, **_: object) -> None:
        found[src.name, cache_hit] += 1

    JITFunction.run = compile_only
    knobs.compilation.listener = count
    torch.empty = torch.zeros  # type: ignore[assignment] # or what no kernel wrote would be read as ids
    return found


def pretend(arch: int) -> None:
    """From now on there is a GPU of compute capability `arch`, 90 for sm_90, and CPU tensors lie on it."""
    driver.set_active(_AbsentGpu(arch))
    stand_in(arch)
