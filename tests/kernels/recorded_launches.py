"""Which compilations launches of Triton kernels ask for, recorded as they are made.

Without a GPU nothing is run: what a kernel would have written is zero.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, KernelInterface, create_function_from_signature

from kernels.triton.compile_check import shipped_modules

OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}
"""What each launch must say."""


class Launch(NamedTuple):
    """All that a compilation depends on, as Triton's own binder sees it."""

    kernel: str
    arguments: tuple[tuple[str, str], ...]
    """Name, and type with alignment, or the value of a compile-time argument."""
    options: tuple[tuple[str, object], ...]


@contextmanager
def recorded(arch: int = 90) -> Iterator[set[Launch]]:
    """Every launch made within it."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    launches: set[Launch] = set()
    with ExitStack() as undo:
        if not torch.cuda.is_available():
            undo.enter_context(patch.object(torch, "empty", torch.zeros))
        for kernel in _kernels():
            undo.enter_context(patch.object(kernel, "run", _noting(kernel, backend, launches)))
        yield launches


def _kernels() -> list[Any]:
    found = {
        id(each): each
        for name in shipped_modules()
        for each in vars(importlib.import_module(name)).values()
        if isinstance(each, KernelInterface)
    }
    return list(found.values())


def _noting(kernel: Any, backend: Any, launches: set[Launch]) -> Any:
    settings = getattr(kernel, "kwargs", None) or vars(kernel)  # interpreted, compiled
    names = ("do_not_specialize", "do_not_specialize_on_alignment")
    compiled = JITFunction(kernel.fn, **{name: settings.get(name) for name in names})
    bind = create_function_from_signature(compiled.signature, compiled.params, backend)
    run = kernel.run

    def noted(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        _, types, options = bind(*args, **kwargs)
        arguments = tuple(zip(compiled.arg_names, map(str, types), strict=True))
        launches.add(Launch(kernel.fn.__name__, arguments, tuple(sorted(options.items()))))
        return run(*args, grid=grid, warmup=warmup, **kwargs) if torch.cuda.is_available() else None

    return noted
