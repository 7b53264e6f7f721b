"""Hand-offs between pools on a GPU, over a stand-in for the CUDA driver: what moves, what is refused, what is left."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from bench.support.cluster import eventually
from kernels.cuda_driver import CudaDriver
from kvtransfer.endpoint import Endpoint
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tandem.errors import ChecksumMismatch, TransferError
from tests.kv_ends import FAILED, Recorder, ends, paired, push_and_commit
from tests.standins.cuda import OTHER_GPU, THIS_GPU, StandInCuda
from tests.transports import make_pool

CUDA = torch.device("cuda", 0)
SOURCES, TARGETS = (4, 5, 6, 9, 2), (8, 9, 10, 11, 1)


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
async def test_blocks_go_past_host_memory(recorder: Recorder, cuda: StandInCuda, transport: str) -> None:
    async with paired(transport) as pair:
        report = await pair.hand_over(recorder, TARGETS, SOURCES, b"first")
        assert (report.transport, report.num_blocks, recorder.payload) == (transport, 5, b"first")
        assert not pair.source.memory.blocks.any()
        assert not pair.target.memory.blocks.any()


async def test_neighbours_on_both_sides_go_in_one_copy(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    copy_async = CudaDriver.copy_async

    def counted(self: CudaDriver, target: int, source: int, num_bytes: int, stream: int) -> None:
        sizes.append(num_bytes)
        copy_async(self, target, source, num_bytes, stream)

    monkeypatch.setattr(CudaDriver, "copy_async", counted)
    async with paired("cuda_ipc") as pair:
        await pair.hand_over(recorder, TARGETS, SOURCES)
    assert sizes == [3 * 256, 256, 256]


async def test_what_a_copy_left_out_fails_the_hand_off(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_async = CudaDriver.copy_async

    def short(self: CudaDriver, target: int, source: int, num_bytes: int, stream: int) -> None:
        copy_async(self, target, source, num_bytes - 1, stream)

    async with paired("cuda_ipc") as pair:
        pair.source.blocks[:, -1] = 1
        pair.target.blocks[:, -1] = 2
        monkeypatch.setattr(CudaDriver, "copy_async", short)
        with pytest.raises(ChecksumMismatch):
            await pair.hand_over(recorder, TARGETS, SOURCES)
        await recorder.until("writer_stopped")
        assert recorder.calls == FAILED


async def test_a_copy_that_the_driver_refuses_costs_one_hand_off(cuda: StandInCuda) -> None:
    async with paired("cuda_ipc") as pair:
        first = Recorder()
        handoff = await pair.begin(first, TARGETS)
        cuda.set("FAIL", "cuMemcpyDtoDAsync_v2:2:2")
        with pytest.raises(TransferError, match="cuMemcpyDtoDAsync_v2: CUDA_ERROR_OUT_OF_MEMORY"):
            await handoff.push(0, SOURCES)
        await handoff.abort()
        await first.until("writer_stopped")
        await pair.hand_over(Recorder(), TARGETS, SOURCES)


async def test_an_allocation_that_cannot_be_mapped_is_left_for_the_next_transport(
    recorder: Recorder, cuda: StandInCuda
) -> None:
    pools = make_pool("cuda_ipc"), make_pool("cuda_ipc")
    async with ends(*pools, "auto", ("cuda_ipc", "tcp")) as pair:
        cuda.set("FAIL", "cuMemMap:1:2")
        assert (await push_and_commit(await pair.begin(recorder, (3,)), (0,))).transport == "tcp"


@pytest.mark.parametrize(
    "call", ["cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuEventCreate", "cuMemImportFromShareableHandle"]
)
async def test_a_forced_transport_that_cannot_start_names_the_call(recorder: Any, cuda: StandInCuda, call: str) -> None:
    async with paired("cuda_ipc") as pair:
        cuda.set("FAIL", f"{call}:1:304")
        with pytest.raises(TransferError, match="CUDA_ERROR_OPERATING_SYSTEM"):
            await pair.begin(recorder)
        assert recorder.calls == []


async def test_an_endpoint_that_claims_a_larger_allocation_maps_nothing(recorder: Any) -> None:
    async with paired("cuda_ipc") as pair:
        offer = pair.offer(recorder)
        larger = offer.endpoint.replace(b"allocation_bytes=65536", b"allocation_bytes=131072")
        assert larger != offer.endpoint
        with pytest.raises(TransferError, match="cuMemMap"):
            await pair.sender.open(offer.ticket, larger, 5.0)


async def test_hand_offs_leave_no_descriptor_no_thread_and_nothing_in_the_driver(cuda: StandInCuda) -> None:
    async with paired("cuda_ipc"):
        pass  # whatever is made once is there now
    descriptors, threads, live = len(os.listdir("/proc/self/fd")), threading.active_count(), cuda.live()
    for _ in range(5):
        async with paired("cuda_ipc") as pair:
            for _ in range(5):
                await pair.hand_over(Recorder(), TARGETS, SOURCES)
            assert cuda.live()["mappings"] == 3 + live["mappings"]
    assert cuda.live() == live
    assert eventually(lambda: threading.active_count() <= threads)  # one that made memory real ends by itself
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_who_cannot_reach_the_peer_says_why(recorder: Any, cuda: StandInCuda) -> None:
    async with paired("cuda_ipc") as pair:
        transport, pool = CudaIpcTransport(lambda: cuda.driver), pair.sender._pool
        fields = Endpoint.decode(pair.offer(recorder).endpoint).reach["cuda_ipc"]

        def reason(**changed: str) -> str | None:
            return transport.unreachable(pool, {**fields, **changed})

        other = "ff010203-0405-0607-0809-0a0b0c0d0e0f"
        assert reason() is None
        assert reason(boot_id="another") == "it is on another machine"
        assert reason(gpu=other) == f"its GPU {other} cannot be seen from here"
        cuda.set("DEVICES", f"{THIS_GPU},{OTHER_GPU}")
        assert reason(gpu=other) is None
        cuda.set("NO_PEER", 1)
        assert reason(gpu=other) == f"cuda:0 has no access to its GPU {other}"
        assert reason() is None  # the same GPU
        cuda.set("DEVICES", f"mig:{THIS_GPU}")
        assert reason() == "this side's GPU is a slice (MIG)"
        pool.device = None
        assert reason() == "this side's pool is not on a GPU"


def test_where_it_does_not_work_the_probe_says_why(cuda: StandInCuda) -> None:
    transport = CudaIpcTransport(lambda: cuda.driver)
    assert transport.probe(CUDA).usable
    assert transport.probe(torch.device("cpu")).reason == "pools on cpu are not on a GPU"
    assert "no-such-libcuda" in CudaIpcTransport(lambda: CudaDriver("no-such-libcuda.so.1")).probe(CUDA).reason
    cuda.set("NO_SHARING", 1)
    assert transport.probe(CUDA).reason == "cuda:0 has no memory that can be exported"
    cuda.set("DEVICES", f"mig:{THIS_GPU}")
    assert "slice of a GPU (MIG)" in transport.probe(CUDA).reason
