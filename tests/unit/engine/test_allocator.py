from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading
import torch
from engine.allocator import keep_freed_memory

torch.set_num_threads(1)

def steps(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        held = [torch.ones(96 * 1024) for _ in range(16)]  # 384 KiB each, all freed at the end of a step
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    steps(3)
    print(steps(20))

def on_its_own_thread():  # as the engine does: not the main thread's arena
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()

on_its_own_thread()
assert keep_freed_memory()
on_its_own_thread()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_steps_temporaries_are_not_faulted_in_again_at_the_next() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    by_default, kept = map(int, done.stdout.split())
    assert kept * 5 < by_default
