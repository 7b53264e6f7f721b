"""The stand-in for NCCL as tests use it, beside that for the driver: pools, its settings, what is still alive in it."""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from kvtransfer.base import DeviceMemory
from kvtransfer.nccl_communicator import Communicators
from kvtransfer.nccl_library import NcclLibrary
from kvtransfer.transport import TransportStatus
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.nccl import NcclTransport
from tests.standins.build import built
from tests.standins.cuda import DevicePool, StandInCuda, standin

KINDS = ("communicators", "ids", "moves")
_CALM_S = 10.0


class StandInNccl:
    """The library of this process; settings hold for all who use it."""

    def __init__(self, cuda: StandInCuda) -> None:
        """Skips the test where the stand-in cannot be built."""
        self.cuda = cuda
        self.path = str(built("libnccl"))
        self._library = ctypes.CDLL(self.path)
        self.set("CUDA", built("libcuda"))
        self.library = NcclLibrary(self.path)

    def transport(self, **limits: Any) -> NcclTransport:
        """One process's, as far as counting goes."""
        communicators = Communicators(**{"begin_s": 5.0, "move_s": 5.0, "abort_s": 5.0, **limits})
        return _OnGpus(lambda: self.cuda.driver, lambda: self.library, communicators)

    def set(self, name: str, value: object) -> None:
        """One of the settings that the head of libnccl.c lists."""
        self._library.standin_nccl_set(name.encode(), str(value).encode())

    def reset(self) -> None:
        """Every setting as it is at first."""
        for name, value in (
            ("DELAY_US", 0),
            ("HOLD", ""),
            ("FAIL", ""),
            ("HANG", ""),
            ("SPOIL", 0),
            ("VERSION", 22707),
        ):
            self.set(name, value)

    def live(self) -> Mapping[str, int]:
        """How many of each kind exist."""
        return {kind: self._library.standin_nccl_live(kind.encode()) for kind in KINDS}


class _GpuEach(NcclTransport):
    """Every pool counts as on a GPU of its own."""

    def _own(self, memory: DeviceMemory) -> dict[str, str]:
        return super()._own(memory) | {"gpu": secrets.token_hex(16)}


class _OnGpus(_GpuEach):
    """Works for pools on the stand-in's GPU, whose tensors are of the CPU."""

    def probe(self, device: torch.device) -> TransportStatus:
        return super().probe(torch.device("cuda", 0))


@cache
def standin_nccl() -> StandInNccl:
    """The one of this process, from now on the library of its nccl."""
    nccl = StandInNccl(standin())
    for transport in TRANSPORTS:
        if isinstance(transport, NcclTransport):
            transport.__class__ = _GpuEach
            transport._driver, transport._library = lambda: nccl.cuda.driver, lambda: nccl.library
            transport._communicators = Communicators(64, begin_s=20.0, move_s=5.0, abort_s=20.0)
    return nccl


def num_descriptors() -> int:
    """Of this process, without those that NCCL keeps until the process ends: for meetings to which no peer came."""
    kept = standin_nccl().live()["ids"] if standin_nccl.cache_info().currsize else 0
    return len(os.listdir("/proc/self/fd")) - kept


def communicators_begin_here() -> None:
    """From now on nccl works for this process's engines, whose pools lie on the stand-in's GPU."""
    standin_nccl()
    probe = NcclTransport.probe
    NcclTransport.probe = lambda self, _: probe(self, torch.device("cuda", 0))  # type: ignore[method-assign]


class NcclPool(DevicePool):
    """A pool on the stand-in's GPU."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        standin_nccl()
        super().__init__(num_blocks, block_bytes)

    def close(self) -> None:
        """Waits for the threads on which closed lanes free what was theirs."""
        ends_s = time.monotonic() + _CALM_S
        while _num_threads() > _num_open() and time.monotonic() < ends_s:
            time.sleep(0.002)
        super().close()


def _num_threads() -> int:
    return sum(thread.name.startswith("kv-nccl") for thread in threading.enumerate())


def _num_open() -> int:
    return sum(transport._communicators.num_open for transport in TRANSPORTS if isinstance(transport, NcclTransport))
