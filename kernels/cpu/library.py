"""The compiled libraries: opened once, beside torch's OpenMP runtime, with the highest tier that the machine runs.

A tier is one set of instructions that all kernels were compiled for. One that was not compiled is, when it is asked
for. Why none can run here is a value (`obstacle`, `tier_obstacle`), not an exception: the service works without.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch  # maps its OpenMP runtime

from kernels.cpu import build
from kernels.cpu.core_loans import ENTRY_BYTES, CoreLoan
from kernels.cpu.tiers import machine_tiers
from shell.telemetry.logging import get_logger
from tandem.errors import InternalError

_log = get_logger(__name__)

_OPENMP = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")


class Library:
    """The kernels of one tier. Instances share the opened libraries and hold nothing else."""

    __slots__ = ("tier",)

    def __init__(self, tier: str | None = None) -> None:
        """Loads the library of `tier`; None takes the highest tier.

        Raises InternalError if the tier cannot run here.
        """
        chosen = tier or best_tier()
        reason = obstacle() if chosen is None else tier_obstacle(chosen)
        if chosen is None or reason is not None:
            raise InternalError(f"tier {chosen} of the native kernels cannot run here: {reason}")
        self.tier = chosen

    def bind(self, name: str, *argtypes: Any, keeps_gil: bool = False) -> Callable[..., None]:
        """The tier's function `tandem_<name>`, which returns nothing. Raises InternalError if there is none.

        Calls release the GIL, unless `keeps_gil`: for work of a few microseconds, which to hand the GIL
        over and back would double.
        """
        handle: ctypes.CDLL = _open(self.tier)[1 if keeps_gil else 0]
        try:
            function = handle[f"tandem_{name}_{self.tier}"]
        except AttributeError as error:
            raise InternalError(f"the native kernels have no {name} in tier {self.tier}") from error
        function.argtypes = argtypes
        function.restype = None
        bound: Callable[..., None] = function
        return bound

    def bind_common(self, name: str, *argtypes: Any) -> Callable[..., None]:
        """The function `tandem_<name>` that all tiers share."""
        function = _open(build.COMMON)[0][f"tandem_{name}"]
        function.argtypes = argtypes
        function.restype = None
        bound: Callable[..., None] = function
        return bound

    def address(self, name: str) -> int | None:
        """Returns the address of a function of the tier, for native code. Raises InternalError if the tier lacks the
        function.
        """
        return ctypes.cast(self.bind(name), ctypes.c_void_p).value  # type: ignore[arg-type]


def obstacle() -> str | None:
    """Why no native kernel can run in this process, or None."""
    return _best()[1]


def best_tier() -> str | None:
    """The highest tier that runs here; None where none does."""
    return _best()[0]


@cache
def tier_obstacle(tier: str) -> str | None:
    """Why `tier` cannot run in this process, or None: then it is compiled and open."""
    if tier not in machine_tiers():
        return f"this machine runs {', '.join(machine_tiers())}"
    try:
        build.build([tier], announce=_log_compiling)
        _open(tier)
    except build.BuildError as error:
        return f"it is not compiled: {error}"
    except OSError as error:
        return f"it cannot be opened: {error}"
    return None


@cache
def _best() -> tuple[str | None, str | None]:
    """The highest tier that runs here, or why the highest of this machine does not."""
    best, *lower = reversed(machine_tiers())
    reason = tier_obstacle(best)
    if reason is None:
        return best, None
    for tier in lower:
        if tier_obstacle(tier) is None:
            _log.warning("slower native CPU kernels are taken", tier=tier, instead_of=best, reason=reason)
            return tier, None
    return None, reason


def _log_compiling(parts: Sequence[str]) -> None:
    _log.info("native CPU kernels are compiled, once for this machine", tiers=", ".join(parts))


def max_threads() -> int:
    """Threads that a kernel called from this thread would use at most: what torch set for it, and guests."""
    return int(_open(build.COMMON)[0].tandem_max_threads())


def take_threads(loan: CoreLoan | None) -> None:
    """Kernels called from this thread use the threads that torch has now, and torch on this thread only this one.

    Torch's own threads spin when they have nothing to do, on cores that the kernels need. With a `loan`, kernels also
    use the cores of others while these compute nothing, and say when they compute; where its ledger cannot be used, a
    warning says so. Idempotent but for the loan, which is taken once.
    """
    torch.get_num_threads()  # it sets its threads at the first call on a thread, and must not later
    _open(build.COMMON)[0].tandem_take_threads()
    # The MKL in torch has a number of threads of its own, which a step's cosines, sines and exponentials would wake.
    with suppress(OSError, AttributeError):  # a torch without it
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local(1)
    if loan is not None:
        try:
            _share_cores(loan)
        except OSError as error:
            _log.warning("cores are not shared with other workers", ledger=loan.ledger, reason=str(error))


def _share_cores(loan: CoreLoan) -> None:
    own = sorted(os.sched_getaffinity(0))
    descriptor = os.open(loan.ledger, os.O_RDWR | os.O_CLOEXEC)
    try:
        num_cores = os.fstat(descriptor).st_size // ENTRY_BYTES
        if max(*own, *loan.cores) >= num_cores:
            raise OSError(f"it has entries of cores below {num_cores}")
        error = ctypes.c_int(0)
        arrays = [(ctypes.c_int32 * len(cores))(*cores) for cores in (own, loan.cores)]
        counts = [ctypes.c_int64(len(cores)) for cores in (own, loan.cores)]
        _open(build.COMMON)[0].tandem_share_cores(
            descriptor, ctypes.c_int64(num_cores), arrays[0], counts[0], arrays[1], counts[1], ctypes.byref(error)
        )
        if error.value:
            raise OSError(error.value, os.strerror(error.value))
    finally:
        os.close(descriptor)


def openmp_runtimes() -> tuple[str, ...]:
    """Paths of the OpenMP runtimes that are mapped into this process. Two of them spin against each other."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    return tuple(sorted({line.split(maxsplit=5)[5] for line in lines if _OPENMP.search(line)}))


@cache
def _open(part: str) -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """A tier or what all of them use, as called without the GIL and as called with it. Raises OSError."""
    mode = ctypes.RTLD_LOCAL
    if part == build.COMMON:
        # Both opened for all: a tier's library names no other one and finds their functions.
        mode = ctypes.RTLD_GLOBAL
        ctypes.CDLL(_openmp_of_torch(), mode=mode)
    else:
        _open(build.COMMON)
    path = str(build.library_path(part))
    return ctypes.CDLL(path, mode=mode), ctypes.PyDLL(path)


def _openmp_of_torch() -> str:
    """Path of the runtime that torch uses. Raises OSError if that is not clear."""
    runtimes = openmp_runtimes()
    # Another package may have brought its own as well.
    brought = [path for path in runtimes if "/torch/" in path or "/torch.libs/" in path] or runtimes
    if len(brought) != 1:
        raise OSError(f"needs the OpenMP runtime that torch brings; mapped are: {', '.join(brought) or 'none'}")
    return brought[0]
