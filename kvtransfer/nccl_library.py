"""NCCL, as far as a transport between two processes needs it: communicators of two ranks, sends, receives, abort.

`libnccl.so.2` through ctypes, opened by the first `NcclLibrary`: to import this takes no GPU. Handles are plain ints.
Each call is checked, and its error says which call failed and what NCCL calls that. Calls release the GIL. All calls
about a communicator are made on one thread, with the GPU's context current there. Constants and structures are those of
`nccl.h` from 2.18 on; a newer library takes a configuration of that version and fills the rest.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, Final

LIBRARY: Final = "libnccl.so.2"
UNIQUE_ID_BYTES: Final = 128

_OLDEST = 21800
"""2.18.0: the configuration below, and an abort that ends whatever a non-blocking communicator is at."""
_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(1 << 31)
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1


class NcclError(RuntimeError):
    """The library is not here, or refused a call, or a communicator has failed."""


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`: passed by value."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """`ncclConfig_t` of 2.18: 48 bytes."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclCommAbort": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}
"""Every entry point that returns a ncclResult_t, and its arguments."""


class NcclLibrary:
    """The opened library. `version` is such as 2.27.7."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Raises NcclError if the library or one of its entry points is missing, or too old."""
        try:
            handle = ctypes.CDLL(library)
            self._functions = {name: _bound(handle, name, types) for name, types in _SIGNATURES.items()}
            self._error_string = _bound(handle, "ncclGetErrorString", (c_int,), c_char_p)
        except (OSError, AttributeError) as error:
            raise NcclError(f"NCCL cannot be used: {error}") from error
        number = c_int()
        self._call("ncclGetVersion", byref(number))
        self.version: Final = _version_text(number.value)
        if number.value < _OLDEST:
            raise NcclError(f"NCCL cannot be used: {library} is {self.version}, needed is {_version_text(_OLDEST)}")

    def unique_id(self) -> bytes:
        """Names a communicator that is to be; whoever asked for it takes part in that. May take long the first time."""
        unique_id = UniqueId()
        self._call("ncclGetUniqueId", byref(unique_id))
        return ctypes.string_at(byref(unique_id), UNIQUE_ID_BYTES)

    def begin(self, unique_id: bytes, rank: int, max_ctas: int) -> int:
        """Starts to make rank `rank` of two; `is_ready` tells when it can be used. `abort` is due in any case.

        What it runs on the GPU takes `max_ctas` thread blocks at most. Does not block.
        """
        config = Config(
            size=ctypes.sizeof(Config),
            magic=_MAGIC,
            version=_OLDEST,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=max_ctas,
            split_share=_UNDEFINED,
        )
        communicator = c_void_p()
        arguments = byref(communicator), 2, UniqueId.from_buffer_copy(unique_id), rank, byref(config)
        self._call("ncclCommInitRankConfig", *arguments)
        return communicator.value or 0

    def is_ready(self, communicator: int) -> bool:
        """Whether what was asked of it last has begun on its stream. Raises NcclError once it has failed."""
        state = c_int()
        self._call("ncclCommGetAsyncError", communicator, byref(state))
        self._check("communicator", state.value)
        return state.value == _SUCCESS

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Sends and receives inside begin together at its end, in any order."""
        self._call("ncclGroupStart")
        try:
            yield
        finally:
            self._call("ncclGroupEnd")

    def send(self, communicator: int, peer: int, address: int, num_bytes: int, stream: int) -> None:
        """Queues a send of device memory; ends only with the peer's receive of as many bytes."""
        self._call("ncclSend", address, num_bytes, _UINT8, peer, communicator, stream)

    def receive(self, communicator: int, peer: int, address: int, num_bytes: int, stream: int) -> None:
        """The other end of `send`."""
        self._call("ncclRecv", address, num_bytes, _UINT8, peer, communicator, stream)

    def abort(self, communicator: int) -> None:
        """Ends whatever it is at and frees it. It is gone even if this raises."""
        self._call("ncclCommAbort", communicator)

    def _call(self, name: str, *args: Any) -> None:
        self._check(name, int(self._functions[name](*args)))

    def _check(self, name: str, status: int) -> None:
        if status not in (_SUCCESS, _IN_PROGRESS):
            text = self._error_string(status) or b""
            raise NcclError(f"{name}: error {status} ({text.decode(errors='replace')})")


def _bound(handle: ctypes.CDLL, name: str, types: tuple[Any, ...], returns: Any = c_int) -> Any:
    function = handle[name]
    function.argtypes = types
    function.restype = returns
    return function


def _version_text(number: int) -> str:
    """Returns the version by NCCL's count since 2.9: 10000 for the first part, 100 for the second."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
