"""The native library is built, opened beside torch's OpenMP runtime, and says why where it is not."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import cpu
from kernels.cpu import build, library
from kernels.cpu.library import Library, best_tier, openmp_runtimes
from kernels.cpu.tiers import machine_tiers
from tandem.errors import InternalError
from tests.kernels.tiers import TIERS

CPU = torch.device("cpu")
FOLDER = build.FOLDER


@pytest.mark.native
def test_the_library_runs_here():
    assert cpu.obstacle(CPU, torch.bfloat16) is None
    assert Library().tier == best_tier()


@pytest.mark.native
def test_one_openmp_runtime_is_mapped_after_a_call():
    Library().bind("rms_norm_f32")
    assert len(openmp_runtimes()) == 1


@pytest.mark.native
def test_the_library_names_no_openmp_runtime_of_its_own():
    for part in (build.COMMON, Library().tier):
        content = build.library_path(part).read_bytes()
        assert b"libgomp" not in content
        assert b"libomp" not in content


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


@pytest.mark.usefixtures("no_library")
def test_no_library_and_no_compiler_is_an_obstacle():
    assert cpu.obstacle(CPU, torch.float32) == "it is not compiled: no C++ compiler: looked for g++, c++, clang++"
    assert best_tier() is None
    with pytest.raises(InternalError, match=r"tier None .* cannot run here: it is not compiled"):
        Library()


def test_a_file_that_is_no_library_is_an_obstacle(no_library):
    for part in (build.COMMON, *machine_tiers()):
        build.library_path(part).write_bytes(b"\x7fELF no more")
    assert "cannot be opened" in cpu.obstacle(CPU, torch.float32)


@pytest.mark.native
@pytest.mark.skipif(len(TIERS) < 2, reason="this machine runs one tier")
def test_without_a_compiler_the_best_tier_that_was_compiled_is_taken_with_a_warning(no_library, caplog):
    for part in (build.COMMON, "baseline"):
        shutil.copy(FOLDER / build.library_path(part).name, no_library)
    assert Library().tier == Library().tier == "baseline"
    (warning,) = caplog.records
    assert warning.getMessage() == "slower native CPU kernels are taken"
    assert (warning.fields["tier"], warning.fields["instead_of"]) == ("baseline", machine_tiers()[-1])
    assert "no C++ compiler" in warning.fields["reason"]


@pytest.mark.native
def test_a_tier_that_is_asked_for_is_compiled_and_no_other(elsewhere, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(build, "_FLAGS", ("-std=c++17", "-O0", "-w", "-fPIC", "-fvisibility=hidden"))
    assert cpu.obstacle(CPU, torch.float32, "baseline") is None
    assert {path.name for path in elsewhere.glob("*.so")} == {
        build.library_path(part).name for part in (build.COMMON, "baseline")
    }
    (line,) = (record.getMessage() for record in caplog.records)
    assert "native CPU kernels are compiled" in line


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
