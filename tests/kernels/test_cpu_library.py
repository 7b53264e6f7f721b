"""The native library is built, opened beside torch's OpenMP runtime, and says why where it is not."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import cpu
from kernels.cpu import build, library
from kernels.cpu.library import Library, openmp_runtimes, usable_tiers
from tandem.errors import InternalError

CPU = torch.device("cpu")


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Where the library is looked for, empty."""
    path = tmp_path / "_native.so"
    monkeypatch.setattr(build, "LIBRARY", path)
    library._open.cache_clear()
    yield path
    library._open.cache_clear()


@pytest.mark.native
def test_the_library_runs_here():
    assert cpu.obstacle(CPU, torch.bfloat16) is None
    assert usable_tiers()[0] == "baseline"
    assert Library().tier == usable_tiers()[-1]


@pytest.mark.native
def test_one_openmp_runtime_is_mapped_after_a_call():
    Library().bind("rms_norm_f32")
    assert len(openmp_runtimes()) == 1


@pytest.mark.native
def test_the_library_names_no_openmp_runtime_of_its_own():
    assert b"libgomp" not in build.LIBRARY.read_bytes()
    assert b"libomp" not in build.LIBRARY.read_bytes()


@pytest.mark.native
def test_threads_are_those_that_torch_set():
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert library.max_threads() == count
    finally:
        torch.set_num_threads(before)


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_torch_computes_alone_on_a_thread_that_kernels_took():
    before = torch.get_num_threads()

    def threads_begun() -> int:
        torch.set_num_threads(4)
        library.take_threads(None)
        others = set(os.listdir("/proc/self/task"))
        values = torch.ones(64, 512)
        values.cos(), values.sin(), values.exp(), values @ values.T  # what MKL shares out by a setting of its own
        return len(set(os.listdir("/proc/self/task")) - others)

    with ThreadPoolExecutor(1) as executor:
        try:
            assert executor.submit(threads_begun).result() == 0
        finally:
            torch.set_num_threads(before)


def test_no_library_is_an_obstacle_that_says_how_to_build_it(elsewhere):
    assert "python -m kernels.cpu.build" in cpu.obstacle(CPU, torch.float32)
    assert usable_tiers() == ()
    with pytest.raises(InternalError, match=r"tier None .* cannot run here: not built"):
        Library()


def test_a_file_that_is_no_library_is_an_obstacle(elsewhere):
    elsewhere.write_bytes(b"\x7fELF no more")
    assert "cannot be opened" in cpu.obstacle(CPU, torch.float32)


@pytest.mark.native
def test_a_library_of_other_sources_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(build, "source_hash", lambda: "of something newer")
    library._open.cache_clear()
    assert "built from other sources" in cpu.obstacle(CPU, torch.float32)
    library._open.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_another_dtype_is_an_obstacle_by_name(dtype):
    assert cpu.obstacle(CPU, dtype) == f"computes float32, bfloat16 and float16, not {dtype}"


def test_a_gpu_is_an_obstacle():
    assert cpu.obstacle(torch.device("cuda"), torch.bfloat16) is not None


@pytest.mark.native
def test_an_unknown_tier_or_function_raises_by_name():
    with pytest.raises(InternalError, match="tier avx9"):
        Library("avx9")
    with pytest.raises(InternalError, match="no warp in tier baseline"):
        Library("baseline").bind("warp")
