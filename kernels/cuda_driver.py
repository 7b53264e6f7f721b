"""The CUDA driver, as far as pools and transports need it: memory that processes share, streams, copies, events.

`libcuda.so.1` through ctypes, opened by the first `CudaDriver`: to import this takes no GPU. Handles and device
addresses are plain ints; whoever creates one destroys it, once. Each call is checked, and its error says which call
failed and what the driver calls that. Calls release the GIL and may be made on any thread; those of streams, events and
copies need a current context there (`current`). Constants and structures are those of `cuda.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final
from uuid import UUID

LIBRARY: Final = "libcuda.so.1"

_SUCCESS, _NOT_READY = 0, 600
_VIRTUAL_MEMORY_SUPPORTED, _FILE_DESCRIPTOR_SUPPORTED, _RDMA_SUPPORTED = 102, 103, 110  # CU_DEVICE_ATTRIBUTE_*
_PINNED, _ON_DEVICE, _FILE_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
_NON_BLOCKING = 1
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_NAME_BYTES = 256


class CudaError(RuntimeError):
    """The driver is not here, or refused a call. `name` is its own name of the error; empty if it is not here."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class MemLocation(ctypes.Structure):
    """`CUmemLocation`: 8 bytes."""

    _fields_ = (("type", c_int), ("id", c_int))


class MemAllocationProp(ctypes.Structure):
    """`CUmemAllocationProp`: 32 bytes."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", MemLocation),
        ("win32_handle_meta_data", c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class MemAccessDesc(ctypes.Structure):
    """`CUmemAccessDesc`: 12 bytes."""

    _fields_ = (("location", MemLocation), ("flags", c_int))


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_char_p, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(MemAllocationProp), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(MemAllocationProp), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(MemAccessDesc), c_size_t),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
}
"""Every entry point and its arguments; each returns a CUresult."""


class CudaDriver:
    """The opened and initialized library. Devices are ordinals, counted as torch counts them."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Raises CudaError if the library, one of its entry points or every GPU is missing."""
        try:
            handle = ctypes.CDLL(library)
            self._functions = {name: _bound(handle, name, types) for name, types in _SIGNATURES.items()}
        except (OSError, AttributeError) as error:
            raise CudaError(f"the CUDA driver cannot be used: {error}") from error
        self._call("cuInit", 0)

    def device_count(self) -> int:
        """GPUs that this process sees."""
        return self._int("cuDeviceGetCount")

    def device_name(self, device: int) -> str:
        """The product's name; a slice of a GPU (MIG) has the slice's name behind it."""
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("cuDeviceGetName", name, _NAME_BYTES, self._device(device))
        return name.value.decode(errors="replace")

    def device_uuid(self, device: int) -> str:
        """Names the GPU, or the slice of one (MIG), on every machine and in every process."""
        data = ctypes.create_string_buffer(16)
        self._call("cuDeviceGetUuid_v2", data, self._device(device))
        return str(UUID(bytes=data.raw))

    def can_share_memory(self, device: int) -> bool:
        """Whether `memory_create` works and its allocations can be exported."""
        attributes = (_VIRTUAL_MEMORY_SUPPORTED, _FILE_DESCRIPTOR_SUPPORTED)
        return all(self._attribute(device, attribute) for attribute in attributes)

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether `device` can read and write memory of `peer`, another device."""
        return bool(self._int("cuDeviceCanAccessPeer", self._device(device), self._device(peer)))

    def retain_context(self, device: int) -> int:
        """The device's primary context, which torch uses too; it lives until as many `release_context`."""
        return self._handle("cuDevicePrimaryCtxRetain", self._device(device))

    def release_context(self, device: int) -> None:
        """Releases a hold that `retain_context` took."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device(device))

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Makes a context this thread's current one; the one before comes back at the end."""
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            with suppress(CudaError):  # of an earlier call, on a lost device: whoever waits for its work is told
                self._handle("cuCtxPopCurrent_v2")

    def granularity(self, device: int) -> int:
        """Bytes of which sizes of allocations and mappings on `device` are multiples."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._allocation(device)), 0)
        return size.value

    def memory_create(self, device: int, size_bytes: int) -> int:
        """An allocation on `device` that can be exported; not mapped yet."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), size_bytes, byref(self._allocation(device)), 0)
        return handle.value

    def memory_release(self, handle: int) -> None:
        """Lets go of an allocation; its memory lives on while it is mapped, or exported to somebody."""
        self._call("cuMemRelease", handle)

    def memory_export(self, handle: int) -> int:
        """A file descriptor of the allocation, owned by the caller; it keeps the memory too."""
        descriptor = c_int(-1)
        self._call("cuMemExportToShareableHandle", ctypes.addressof(descriptor), handle, _FILE_DESCRIPTOR, 0)
        return descriptor.value

    def memory_import(self, descriptor: int) -> int:
        """The allocation behind another process's descriptor, which stays the caller's to close."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), descriptor, _FILE_DESCRIPTOR)
        return handle.value

    def address_reserve(self, size_bytes: int) -> int:
        """Returns a range of device addresses with nothing behind these addresses."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size_bytes, 0, 0, 0)
        return address.value

    def address_free(self, address: int, size_bytes: int) -> None:
        """Gives back a whole reserved range; nothing may be mapped there."""
        self._call("cuMemAddressFree", address, size_bytes)

    def memory_map(self, address: int, size_bytes: int, handle: int) -> None:
        """Puts an allocation from its byte 0 behind a reserved range; nobody may access it yet."""
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def memory_unmap(self, address: int, size_bytes: int) -> None:
        """Removes the memory behind an address range. No work that uses the range may be running."""
        self._call("cuMemUnmap", address, size_bytes)

    def memory_allow(self, address: int, size_bytes: int, device: int) -> None:
        """Lets `device` read and write a mapped range."""
        access = MemAccessDesc(MemLocation(_ON_DEVICE, self._device(device)), _READ_WRITE)
        self._call("cuMemSetAccess", address, size_bytes, byref(access), 1)

    def copy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queues a copy between device addresses, which may belong to two devices."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)

    def stream_create(self) -> int:
        """A stream in the current context that never waits for the default stream, nor that for it."""
        return self._handle("cuStreamCreate", _NON_BLOCKING)

    def stream_synchronize(self, stream: int) -> None:
        """Returns once all that was queued has ended. Raises CudaError of whatever failed there."""
        self._call("cuStreamSynchronize", stream)

    def stream_destroy(self, stream: int) -> None:
        """What is queued still runs to its end."""
        self._call("cuStreamDestroy_v2", stream)

    def event_create(self) -> int:
        """An event in the current context; who waits for it sleeps instead of spinning on a core."""
        return self._handle("cuEventCreate", _BLOCKING_SYNC | _DISABLE_TIMING)

    def event_record(self, event: int, stream: int) -> None:
        """Makes the event stand for all work that `stream` has queued so far."""
        self._call("cuEventRecord", event, stream)

    def event_ended(self, event: int) -> bool:
        """Whether all work before the event has ended. Raises CudaError if the work failed."""
        status = int(self._functions["cuEventQuery"](event))
        if status != _NOT_READY:
            self._check("cuEventQuery", status)
        return status == _SUCCESS

    def event_synchronize(self, event: int) -> None:
        """Returns once all work before the event has ended. Raises CudaError if the work failed."""
        self._call("cuEventSynchronize", event)

    def event_destroy(self, event: int) -> None:
        """Destroys the event. Allowed at any time; no wait on the event may follow."""
        self._call("cuEventDestroy_v2", event)

    def _allocation(self, device: int) -> MemAllocationProp:
        """What `memory_create` asks for; network cards may reach it where they can, for transports that use them."""
        return MemAllocationProp(
            type=_PINNED,
            requested_handle_types=_FILE_DESCRIPTOR,
            location=MemLocation(_ON_DEVICE, self._device(device)),
            gpu_direct_rdma_capable=self._attribute(device, _RDMA_SUPPORTED),
        )

    def _attribute(self, device: int, attribute: int) -> int:
        return self._int("cuDeviceGetAttribute", attribute, self._device(device))

    def _device(self, ordinal: int) -> int:
        return self._int("cuDeviceGet", ordinal)

    def _int(self, name: str, *args: Any) -> int:
        value = c_int()
        self._call(name, byref(value), *args)
        return value.value

    def _handle(self, name: str, *args: Any) -> int:
        handle = c_void_p()
        self._call(name, byref(handle), *args)
        return handle.value or 0

    def _call(self, name: str, *args: Any) -> None:
        self._check(name, int(self._functions[name](*args)))

    def _check(self, name: str, status: int) -> None:
        if status != _SUCCESS:
            error_name = self._text("cuGetErrorName", status) or f"error {status}"
            raise CudaError(f"{name}: {error_name} ({self._text('cuGetErrorString', status)})", error_name)

    def _text(self, name: str, status: int) -> str:
        text = c_char_p()
        self._functions[name](status, byref(text))
        return (text.value or b"").decode(errors="replace")


def _bound(handle: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Any:
    function = handle[name]
    function.argtypes = types
    function.restype = c_int
    return function
