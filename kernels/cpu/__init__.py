"""Native kernels for CPUs: C++ in `src/`, one copy per instruction tier, bound by ctypes."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from kernels.cpu.tiers import machine_tiers

if TYPE_CHECKING:  # not at run time: setup.py imports this package where torch is not installed
    import torch

    from kernels.operations import Kernels

_FULL_TOKENS = 128
"""Measured with the 135m shape: a token takes as long from 96 tokens on; with AMX 15 % less at 2,048 than at 512."""
_AMX = "amx"


def obstacle(device: torch.device, dtype: torch.dtype, tier: str | None = None) -> str | None:
    """Why these kernels cannot run on `device` with `dtype`, at `tier` if one is given, or None."""
    from kernels.cpu import library
    from kernels.cpu.operations import COMPUTED, DTYPES

    if device.type != "cpu":
        return "native code for the CPU only"
    if dtype not in DTYPES:
        return f"computes {COMPUTED}, not {dtype}"
    if tier is not None:
        return library.tier_obstacle(tier)
    reason = library.obstacle()
    if reason is not None:
        _warn_once(reason)
    return reason


def describe() -> str:
    """What runs here; only where `obstacle` is None."""
    from kernels.cpu import library

    return f"native C++ kernels, tier {library.best_tier()} of {', '.join(machine_tiers())}"


def load(tier: str | None = None) -> Kernels:
    """All of them at `tier`, without it at the highest that this machine runs. Raises InternalError if it does not."""
    from kernels.cpu.attention import CpuAttention
    from kernels.cpu.core_loans import CoreLoan
    from kernels.cpu.decoder import compile_step
    from kernels.cpu.library import Library, take_threads
    from kernels.cpu.operations import CpuOperations
    from kernels.cpu.row_max import RowMax
    from kernels.operations import Kernels

    library = Library(tier)
    return Kernels(
        CpuAttention(library),
        CpuOperations(library),
        row_max=RowMax(library),
        take_thread=partial(take_threads, CoreLoan.of_process()),
        full_tokens=None if library.tier == _AMX else _FULL_TOKENS,
        compile_step=partial(compile_step, library),
    )


@cache
def _warn_once(reason: str) -> None:
    from shell.telemetry.logging import get_logger

    get_logger(__name__).warning("native CPU kernels are unavailable; plain torch is slower", reason=reason)
