"""The device as a step sees it: work is queued in order, and a mark tells when all before it has ended.

    upload stream    ─ inputs of step k+1 ─┐
    compute stream   ─ step k ─────────────┴─ step k+1 ─▶

On a CPU each call has done its work when it returns, and marks are points in time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch

_MarkT = TypeVar("_MarkT", bound="Mark")


class Mark(Protocol):
    """A point in a device's queue."""

    def wait(self) -> None:
        """Returns once all work queued before it has ended. Raises RuntimeError (torch) if the device broke."""
        ...

    def seconds_since(self: _MarkT, earlier: _MarkT) -> float:
        """Time on the device between two marks, both passed."""
        ...


class Device(Protocol):
    """Where steps compute."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether work goes on after the call that queued it."""
        ...

    def uploading(self) -> AbstractContextManager[None]:
        """Copies to the device made within it do not wait for steps; `mark` within it marks them."""
        ...

    def mark(self) -> Mark:
        """The end of what was queued so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """What is queued from now on starts after `mark`; the host goes on."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its copy on the host, to be read once a mark made after this call was waited for."""
        ...

    def synchronize(self) -> None:
        """Returns once nothing runs on the device any more, even if it broke."""
        ...


class HostMark:
    """Implements `Mark`."""

    __slots__ = ("_at_s",)

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """See `Mark.wait`."""

    def seconds_since(self, earlier: HostMark) -> float:
        """See `Mark.seconds_since`."""
        return self._at_s - earlier._at_s


class HostDevice:
    """Implements `Device` for a CPU."""

    __slots__ = ()

    @property
    def is_asynchronous(self) -> bool:
        """See `Device.is_asynchronous`."""
        return False

    def uploading(self) -> AbstractContextManager[None]:
        """See `Device.uploading`."""
        return nullcontext()

    def mark(self) -> Mark:
        """See `Device.mark`."""
        return HostMark()

    def wait_for(self, mark: Mark) -> None:
        """See `Device.wait_for`."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device.to_host`."""
        return tensor

    def synchronize(self) -> None:
        """See `Device.synchronize`."""


class CudaMark:
    """Implements `Mark`."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        """On the current stream."""
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def wait(self) -> None:
        """See `Mark.wait`."""
        self.event.synchronize()

    def seconds_since(self, earlier: CudaMark) -> float:
        """See `Mark.seconds_since`."""
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaDevice:
    """Implements `Device`: steps on the current stream of the thread that launches them, uploads on one beside it."""

    __slots__ = ("_device", "_uploads")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uploads: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def is_asynchronous(self) -> bool:
        """See `Device.is_asynchronous`."""
        return True

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """See `Device.uploading`."""
        with torch.cuda.stream(self._uploads):
            yield

    def mark(self) -> Mark:
        """See `Device.mark`."""
        return CudaMark()

    def wait_for(self, mark: Mark) -> None:
        """See `Device.wait_for`."""
        assert isinstance(mark, CudaMark)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device.to_host`; pinned, so that the copy is queued like all else."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def synchronize(self) -> None:
        """See `Device.synchronize`; a broken context runs nothing any more, and its error is raised elsewhere."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return


def open_device(device: torch.device) -> Device:
    """The one that `device` names."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()
