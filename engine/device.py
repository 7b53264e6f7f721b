"""The device as a step sees it: work is queued in order, and a mark tells when all before it has ended.

    upload stream    ─ inputs of step k+1 ─┐
    compute stream   ─ step k ──┬──────────┴─ step k+1 ─▶
    download stream             └─ tokens of step k ─▶

On a CPU each call has done its work when it returns, and marks are points in time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

_LOST = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
}
"""CUDA's errors after which all later work of the process fails (CUDA Runtime API, `cudaError`), code and text."""


def is_lost(error: BaseException) -> bool:
    """Whether it says that the device does nothing more for this process. Other errors leave later steps unharmed."""
    if not isinstance(error, RuntimeError):  # torch.AcceleratorError is one
        return False
    if getattr(error, "error_code", None) in _LOST:
        return True
    text = str(error)  # of libraries that give no code: cuBLAS, Triton, older torch
    return "CUDA" in text and any(lost in text for lost in _LOST.values())


class Mark:
    """A point in a device's queue: on a GPU an event."""

    __slots__ = ("_at_s", "event")

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Returns once all work queued before it has ended. Raises RuntimeError (torch) if the device broke."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Time on the device between two marks, both passed."""
        if self.event is None or earlier.event is None:
            return self._at_s - earlier._at_s
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One that nobody else has: torch hands out 32 of each priority in turn, and each connection takes a usual one."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class Device:
    """Where steps compute: on a GPU on the launching thread's current stream, with copies on two beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_asynchronous = device.type == "cuda"
        """Whether work goes on after the call that queued this work."""
        self._uploads = _copy_stream(device) if self.is_asynchronous else None
        self._downloads = _copy_stream(device) if self.is_asynchronous else None

    def uploading(self) -> AbstractContextManager[None]:
        """Copies to the device made within it do not wait for steps; `mark` within it marks them."""
        return nullcontext() if self._uploads is None else torch.cuda.stream(self._uploads)

    def mark(self) -> Mark:
        """The end of what the current stream has queued so far."""
        if not self.is_asynchronous:
            return Mark(None)
        # blocking: whoever waits for it sleeps, where it would otherwise keep a core busy for whole steps
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return Mark(event)

    def wait_for(self, mark: Mark) -> None:
        """What is queued from now on starts after `mark`; the host goes on."""
        if mark.event is not None:
            torch.cuda.current_stream(self._device).wait_event(mark.event)

    def downloading(self) -> AbstractContextManager[None]:
        """Copies to the host made within it wait for what is queued so far, and what is queued later not for them.

        `mark` within it marks them, and so all that was queued before.
        """
        return nullcontext() if self._downloads is None else self._download(self._downloads)

    @contextlib.contextmanager
    def _download(self, downloads: torch.cuda.Stream) -> Iterator[None]:
        downloads.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(downloads):
            yield

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its copy on the host, made within `downloading`; to be read once a mark made after this was waited for."""
        if self._downloads is None:
            return tensor
        tensor.record_stream(self._downloads)  # its memory is not given to a later step before it has been read
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # pinned, so that the copy is queued too
        return host.copy_(tensor, non_blocking=True)

    def synchronize(self) -> None:
        """Returns once nothing runs on the device, even if the device broke: that error is raised elsewhere."""
        synchronize(self._device)


def synchronize(device: torch.device) -> None:
    """Returns once nothing runs on `device`, even if it broke: called before memory that it uses is freed."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
