"""The tiers: sets of instructions that every kernel is compiled for, and which of them this machine runs.

Knows nothing of torch or of compiled code, so that it works at install time.
"""

from __future__ import annotations

import ctypes
import sysconfig
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tier:
    """One set: what it adds to a compiler's options, and Linux' names of what a processor needs for it."""

    flags: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_X86 = {
    "baseline": Tier(),
    "avx2": Tier(_AVX2, frozenset({"avx2", "fma", "f16c"})),
    "avx512": Tier(_AVX512, frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})),
    "avx512_bf16": Tier(_AVX512_BF16, frozenset({"avx512_bf16", "avx512_vnni"})),
    "amx": Tier((*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"), frozenset({"amx_tile", "amx_bf16"})),
}
_ARM64 = {"baseline": Tier(), "neon_bf16": Tier(("-mcpu=generic+lse+bf16",), frozenset({"bf16"}))}
MACHINE = sysconfig.get_platform().rpartition("-")[2]
"""The architecture that kernels are compiled for: this machine's, or what `_PYTHON_HOST_PLATFORM` says, by which Python
itself and setuptools know that they build for another one.
"""
TIERS = {"x86_64": _X86, "aarch64": _ARM64}.get(MACHINE, {"baseline": Tier()})
"""Tiers of this architecture, lowest first; each has all instructions of the tiers before."""

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE_DATA = 158, 0x1023, 18
_AT_HWCAP2, _HWCAP2_BF16 = 26, 1 << 14


@cache
def machine_tiers() -> tuple[str, ...]:
    """The tiers that processor and system allow, lowest first; baseline is always one.

    Linux gives AMX tiles to a process that asks. This asks, for all threads of the process.
    """
    has = _arm64_features() if MACHINE == "aarch64" else _x86_features(Path("/proc/cpuinfo"))
    allowed = tuple(takewhile(lambda name: TIERS[name].features <= has, TIERS))
    return allowed if "amx" not in allowed or _may_use_amx() else allowed[:-1]


def _x86_features(cpuinfo: Path) -> set[str]:
    """Returns the features of the first processor, where the system saves the registers that they need."""
    try:
        with cpuinfo.open() as lines:
            return set(next((line for line in lines if line.startswith("flags")), "").split())
    except OSError:
        return set()


def _arm64_features() -> set[str]:
    # Not /proc/cpuinfo: under QEMU that is the host's.
    return {"bf16"} if ctypes.CDLL(None).getauxval(ctypes.c_ulong(_AT_HWCAP2)) & _HWCAP2_BF16 else set()


def _may_use_amx() -> bool:
    arguments = map(ctypes.c_long, (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE_DATA))
    return bool(ctypes.CDLL(None).syscall(*arguments) == 0)
