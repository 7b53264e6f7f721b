from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
import torch
from engine.loading import keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def steps(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        held = [torch.ones(96 * 1024) for _ in range(16)]  # 384 KiB each, all freed at the end of a step
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    steps(3)
    print(steps(20))

thread = threading.Thread(target=measure)  # as the engine does: not the main thread's arena
thread.start()
thread.join()
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_steps_temporaries_are_not_faulted_in_again_at_the_next() -> None:
    assert page_faults("keep") * 5 < page_faults("default")
