"""Triton kernels build for GPUs that are not here, and the check that says so can fail."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROOT = Path(__file__).parents[2]
CACHE = Path(sys.prefix) / "triton-cache"

SUBSET = (
    r"^((prefill|decode) \S+bfloat16 D=128 S=16$|decode .* int8$|rotate_and_store bf16 D=128 norm( int8)?$"
    r"|silu_mul bf16|add_rms_norm bf16 E=576|copy blocks|digest blocks|sampling pick"
    r"|quantized grouped bf16 int4 by 32 T=8$)"
)
"""One of each kind; `make compile-check` builds all."""


def check(*arguments):
    """Runs the compile check as a person would; in a process of its own, since others interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.triton.compile_check", "--cache", str(CACHE), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=110)


def test_each_fault_is_named_with_its_variant_and_fails_the_check():
    done = check("tests.kernels.faulty_kernels", "--arch", "80")
    lines = done.stdout.splitlines()
    verdicts = {name: next(line for line in lines if f" {name}: " in line) for name in ("sound", "spills", "too deep")}
    assert done.returncode == 1, done.stderr
    assert verdicts["sound"].endswith(": ok")
    assert "bytes per thread" in verdicts["spills"]
    assert "shared memory, the limit is 166912" in verdicts["too deep"]
    assert any(" ill-typed: does not compile: " in line for line in lines)
    assert "forgotten_kernel: has no variant" in lines
    assert not any(line.startswith("helper") for line in lines)
    assert lines[-1].endswith("4 with faults")


def test_one_of_each_kind_of_kernel_builds_for_sm_90_within_its_budget():
    done = check("--arch", "90", "--match", SUBSET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("11 builds")


def test_a_check_of_nothing_fails():
    assert check("tests.kernels.faulty_kernels", "--match", "no such variant").returncode == 1


def test_it_refuses_to_run_interpreted():
    done = subprocess.run(
        [sys.executable, "-m", "kernels.triton.compile_check"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr
