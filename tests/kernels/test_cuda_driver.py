"""The driver's binding against a stand-in that is compiled from the driver's own header."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kernels import cuda_driver
from kernels.cuda_driver import CudaDriver, CudaError
from kernels.cuda_memory import SharedAllocation, map_shared
from tests.standins.build import cuda_headers
from tests.standins.cuda import OTHER_GPU, THIS_GPU, StandInCuda, fresh, tensor_over

SIZE_BYTES = 3 << 16


@pytest.fixture
def cuda() -> Iterator[StandInCuda]:
    with fresh() as standin:
        yield standin


def test_structures_lie_as_the_drivers_header_says(tmp_path: Path) -> None:
    compiler, headers = shutil.which("cc"), cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("needs a C compiler and cuda.h")
    expected = {
        "CUmemLocation": cuda_driver.MemLocation,
        "CUmemAccessDesc": cuda_driver.MemAccessDesc,
        "CUmemAllocationProp": cuda_driver.MemAllocationProp,
    }
    source = ["#include <cuda.h>", "#include <stddef.h>"]
    for name, structure in expected.items():
        source.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}");')
    prop = cuda_driver.MemAllocationProp
    places = {
        "requestedHandleTypes": prop.requested_handle_types,
        "location": prop.location,
        "win32HandleMetaData": prop.win32_handle_meta_data,
        "allocFlags.gpuDirectRDMACapable": prop.gpu_direct_rdma_capable,
    }
    for name, place in places.items():
        source.append(f'_Static_assert(offsetof(CUmemAllocationProp, {name}) == {place.offset}, "{name}");')
    file = tmp_path / "layout.c"
    file.write_text("\n".join(source) + "\n")
    subprocess.run([compiler, f"-I{headers}", "-fsyntax-only", str(file)], check=True)


def test_a_missing_driver_is_named() -> None:
    with pytest.raises(CudaError, match=r"the CUDA driver cannot be used: .*no-such-libcuda"):
        CudaDriver("no-such-libcuda.so.1")


def test_a_driver_without_an_entry_point_is_named() -> None:
    with pytest.raises(CudaError, match="cuGetErrorName"):
        CudaDriver("libc.so.6")


def test_errors_name_the_call_and_the_drivers_reason(cuda: StandInCuda) -> None:
    cuda.set("FAIL", "cuMemCreate:1:2")
    with pytest.raises(CudaError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        cuda.driver.memory_create(0, SIZE_BYTES)
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"


def test_devices_are_named_by_uuid_and_slices_by_name(cuda: StandInCuda) -> None:
    cuda.set("DEVICES", f"{THIS_GPU},mig:{OTHER_GPU}")
    assert cuda.driver.device_count() == 2
    assert cuda.driver.device_uuid(0) == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert [" MIG " in cuda.driver.device_name(i) for i in range(2)] == [False, True]
    assert cuda.driver.can_access_peer(0, 1)
    cuda.set("NO_PEER", 1)
    assert not cuda.driver.can_access_peer(0, 1)
    with pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        cuda.driver.device_uuid(2)


def test_one_process_sees_what_another_wrote_through_the_descriptor(cuda: StandInCuda) -> None:
    owner = SharedAllocation(cuda.driver, 0, SIZE_BYTES - 5)
    assert owner.range.size_bytes == SIZE_BYTES
    other = map_shared(cuda.driver, 0, owner.descriptor, SIZE_BYTES)
    assert other.address != owner.range.address
    tensor_over(owner.range)[:4].fill_(7)
    owner.close()
    assert tensor_over(other)[:4].tolist() == [7] * 4  # the memory lives while it is mapped
    other.close()
    other.close()


@pytest.mark.parametrize(
    "call",
    ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"],
)
def test_an_allocation_that_fails_half_way_leaves_nothing(cuda: StandInCuda, call: str) -> None:
    descriptors, before = len(os.listdir("/proc/self/fd")), cuda.live()
    cuda.set("FAIL", f"{call}:1:304")
    with pytest.raises(CudaError, match=f"{call}: CUDA_ERROR_OPERATING_SYSTEM"):
        SharedAllocation(cuda.driver, 0, SIZE_BYTES)
    assert cuda.live() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_exhausted_descriptors_are_the_drivers_error(cuda: StandInCuda) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(CudaError, match="cuMemCreate: CUDA_ERROR_OPERATING_SYSTEM"):
            SharedAllocation(cuda.driver, 0, SIZE_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def test_a_descriptor_of_something_else_is_refused(cuda: StandInCuda) -> None:
    descriptor = os.memfd_create("no allocation")
    with pytest.raises(CudaError, match="cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE"):
        map_shared(cuda.driver, 0, descriptor, SIZE_BYTES)
    os.close(descriptor)


def test_a_mapping_larger_than_the_allocation_is_refused(cuda: StandInCuda) -> None:
    owner = SharedAllocation(cuda.driver, 0, SIZE_BYTES)
    before = cuda.live()
    with pytest.raises(CudaError, match="cuMemMap"):
        map_shared(cuda.driver, 0, owner.descriptor, 2 * SIZE_BYTES)
    assert cuda.live() == before
    owner.close()


def test_an_event_ends_with_the_copies_before_it(cuda: StandInCuda, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    driver, owner = cuda.driver, SharedAllocation(cuda.driver, 0, SIZE_BYTES)
    memory = tensor_over(owner.range)
    memory[:64] = 5
    context = driver.retain_context(0)
    with driver.current(context):
        stream, event = driver.stream_create(), driver.event_create()
        cuda.set("HOLD", hold)
        driver.copy_async(owner.range.address + 64, owner.range.address, 64, stream)
        driver.event_record(event, stream)
        assert not driver.event_ended(event)
        hold.unlink()
        driver.event_synchronize(event)
        assert driver.event_ended(event)
        assert memory[64:128].tolist() == [5] * 64
        driver.event_destroy(event)
        driver.stream_synchronize(stream)
        driver.stream_destroy(stream)
    driver.release_context(0)
    owner.close()


def test_a_copy_that_fails_on_the_device_is_named_by_the_wait(cuda: StandInCuda) -> None:
    driver, owner = cuda.driver, SharedAllocation(cuda.driver, 0, SIZE_BYTES)
    context = driver.retain_context(0)
    with driver.current(context):
        stream = driver.stream_create()
        cuda.set("FAIL", "copy:1:719")
        driver.copy_async(owner.range.address + 64, owner.range.address, 64, stream)
        with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
            driver.stream_synchronize(stream)
        cuda.reset()
        driver.stream_destroy(stream)
    driver.release_context(0)
    owner.close()


def test_streams_need_a_current_context(cuda: StandInCuda) -> None:
    with pytest.raises(CudaError, match="cuStreamCreate: CUDA_ERROR_INVALID_CONTEXT"):
        cuda.driver.stream_create()
