"""Where NCCL can be used, and what says why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.cuda_driver import CudaError
from kvtransfer.nccl_library import NcclError, NcclLibrary
from kvtransfer.receiver import KvReceiver
from kvtransfer.transports.nccl import NcclTransport
from tandem.errors import ConfigError
from tests.kv_ends import QUICK
from tests.manual_clock import ManualClock
from tests.standins.cuda import THIS_GPU, DevicePool
from tests.standins.nccl import StandInNccl, standin_nccl
from tests.transports import PRINTS


@pytest.fixture
def nccl() -> Iterator[StandInNccl]:
    stand_in = standin_nccl()
    stand_in.reset()
    yield stand_in
    stand_in.reset()


def test_what_cannot_work_is_told_by_the_probe(nccl: StandInNccl) -> None:
    def no_driver() -> Any:
        raise CudaError("the CUDA driver cannot be used: no such file")

    cuda = torch.device("cuda", 0)
    assert NcclTransport(lambda: nccl.cuda.driver, lambda: nccl.library).probe(cuda).usable
    assert NcclTransport().probe(torch.device("cpu")).reason == "pools on cpu are not on a GPU"
    missing = NcclTransport(lambda: nccl.cuda.driver, lambda: NcclLibrary("libnccl-of-nobody.so.2"))
    assert "libnccl-of-nobody" in missing.probe(cuda).reason
    assert "driver cannot be used" in NcclTransport(no_driver).probe(cuda).reason


def test_a_slice_of_a_gpu_is_refused_by_name(nccl: StandInNccl) -> None:
    nccl.cuda.set("DEVICES", f"mig:{THIS_GPU}")
    transport = NcclTransport(lambda: nccl.cuda.driver, lambda: nccl.library)
    assert "slice of a GPU (MIG)" in transport.probe(torch.device("cuda", 0)).reason
    nccl.cuda.reset()


def test_a_library_too_old_is_refused_by_name(nccl: StandInNccl) -> None:
    path = nccl.path
    nccl.set("VERSION", 21703)
    with pytest.raises(NcclError, match=r"is 2\.17\.3, needed is 2\.18\.0"):
        NcclLibrary(path)


def test_a_pool_in_host_memory_is_refused_by_name(nccl: StandInNccl, make_pool: Callable[..., Any]) -> None:
    known = (nccl.transport(),)
    receiver = KvReceiver(make_pool().memory, PRINTS, ManualClock(), ("nccl",), "127.0.0.1", timing=QUICK, known=known)
    with pytest.raises(ConfigError, match="nccl needs a pool on a GPU"):
        asyncio.run(receiver.start())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"gpu": "00010203-0405-0607-0809-0a0b0c0d0e0f"}, "it is on the same GPU, where NCCL allows one process only"),
        ({"version": "2.19.3"}, "its NCCL is 2.19.3, this side's 2.27.7"),
    ],
)
def test_whom_it_does_not_reach(nccl: StandInNccl, change: dict[str, str], reason: str | None) -> None:
    transport = NcclTransport(lambda: nccl.cuda.driver, lambda: nccl.library)
    pool, fields = DevicePool(16, 256), {"gpu": "ff", "version": "2.27.7"} | change
    assert transport.unreachable(SimpleNamespace(device=pool.memory.device), fields) == reason
    pool.close()
