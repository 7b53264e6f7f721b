"""The compiled library: opened once, beside torch's OpenMP runtime, with the highest tier that the machine runs.

A tier is one set of instructions that all kernels were compiled for. Why there is no library here, or
which tier it runs, is a value (`obstacle`, `usable_tiers`), not an exception: the service works without.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch  # maps its OpenMP runtime

from kernels.cpu import build
from tandem.core_loans import ENTRY_BYTES, CoreLoan
from tandem.errors import InternalError
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)

_OPENMP = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")
_REBUILD = "python -m kernels.cpu.build"


class _Unavailable(Exception):
    """The library cannot be used; the message says why and what would help."""


class Library:
    """The kernels of one tier. Instances share the one opened library and hold nothing else."""

    __slots__ = ("tier",)

    def __init__(self, tier: str | None = None) -> None:
        """`tier` None takes the highest. Raises InternalError if it cannot run here."""
        usable = usable_tiers()
        if tier is None and usable:
            tier = usable[-1]
        if tier is None or tier not in usable:
            raise InternalError(f"tier {tier} of the native kernels cannot run here: {obstacle() or usable}")
        self.tier = tier

    def bind(self, name: str, *argtypes: Any, keeps_gil: bool = False) -> Callable[..., None]:
        """The tier's function `tandem_<name>`, which returns nothing. Raises InternalError if there is none.

        Calls release the GIL, unless `keeps_gil`: for work of a few microseconds, which to hand the GIL
        over and back would double.
        """
        handle: ctypes.CDLL = _open()[1 if keeps_gil else 0]
        try:
            function = handle[f"tandem_{name}_{self.tier}"]
        except AttributeError as error:
            raise InternalError(f"the native kernels have no {name} in tier {self.tier}; {_REBUILD}") from error
        function.argtypes = argtypes
        function.restype = None
        bound: Callable[..., None] = function
        return bound

    def bind_common(self, name: str, *argtypes: Any) -> Callable[..., None]:
        """The function `tandem_<name>` that all tiers share."""
        function = _open()[0][f"tandem_{name}"]
        function.argtypes = argtypes
        function.restype = None
        bound: Callable[..., None] = function
        return bound

    def address(self, name: str) -> int | None:
        """Of the tier's function, for native code that calls it. Raises InternalError if there is none."""
        return ctypes.cast(self.bind(name), ctypes.c_void_p).value  # type: ignore[arg-type]


def obstacle() -> str | None:
    """Why no native kernel can run in this process, or None."""
    try:
        _open()
    except _Unavailable as error:
        return str(error)
    return None


def usable_tiers() -> tuple[str, ...]:
    """The tiers that were compiled and that processor and system allow, lowest first; empty without a library."""
    try:
        handle = _open()[0]
    except _Unavailable:
        return ()
    built = _text(handle, "tandem_built_tiers").split()
    allowed = build.TIERS[: handle.tandem_machine_tier() + 1]
    return tuple(tier for tier in allowed if tier in built)


def max_threads() -> int:
    """Threads that a kernel called from this thread would use at most: what torch set for it, and guests."""
    return int(_open()[0].tandem_max_threads())


def take_threads(loan: CoreLoan | None) -> None:
    """Kernels called from this thread use the threads that torch has now, and torch on this thread only this one.

    Torch's own threads spin when they have nothing to do, on cores that the kernels need. With a `loan`, kernels also
    use the cores of others while these compute nothing, and say when they compute; where its ledger cannot be used, a
    warning says so. Idempotent but for the loan, which is taken once.
    """
    torch.get_num_threads()  # it sets its threads at the first call on a thread, and must not later
    _open()[0].tandem_take_threads()
    # The MKL in torch has a number of threads of its own, which a step's cosines, sines and exponentials would wake.
    with suppress(OSError, AttributeError):  # a torch without it
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local(1)
    if loan is not None:
        try:
            _share_cores(loan)
        except OSError as error:
            _log.warning("cores are not shared with other workers", ledger=loan.ledger, reason=str(error))


def take_num_lent() -> int:
    """The most borrowed cores that any one kernel, called from this thread, had since the last call."""
    return int(_open()[1].tandem_take_most_guests())


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
        _open()[0].tandem_share_cores(
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
def _open() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """The library, as called without the GIL and as called with it. Raises _Unavailable."""
    if not build.LIBRARY.exists():
        raise _Unavailable(f"not built at install, for want of a C++ compiler or by its error; try {_REBUILD}")
    try:
        # Opened again, for all: our library names no runtime and finds its functions here.
        ctypes.CDLL(_openmp_of_torch(), mode=ctypes.RTLD_GLOBAL)
        handle = ctypes.CDLL(str(build.LIBRARY))
        built_from = _text(handle, "tandem_sources")
    except (OSError, AttributeError) as error:
        raise _Unavailable(f"{build.LIBRARY.name} cannot be opened: {error}; try {_REBUILD}") from error
    if built_from != build.source_hash():
        raise _Unavailable(f"{build.LIBRARY.name} was built from other sources; run {_REBUILD}")
    return handle, ctypes.PyDLL(str(build.LIBRARY))


def _openmp_of_torch() -> str:
    """Path of the runtime that torch uses. Raises _Unavailable if that is not clear."""
    runtimes = openmp_runtimes()
    # Another package may have brought its own as well.
    brought = [path for path in runtimes if "/torch/" in path or "/torch.libs/" in path] or runtimes
    if len(brought) != 1:
        raise _Unavailable(f"needs the OpenMP runtime that torch brings; mapped are: {', '.join(brought) or 'none'}")
    return brought[0]


def _text(handle: ctypes.CDLL, name: str) -> str:
    """Calls a function that returns a string."""
    function = handle[name]
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()
