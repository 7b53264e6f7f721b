"""First on PYTHONPATH, it has every worker process keep its pool on the stand-in's GPU; models compute on the CPU.

`bench.fuzz_transfer`, which has both sides in its own process, then reaches cuda_ipc and nccl too.
"""

import runpy
import sys

HOLD_POOLS = ("prefill_worker", "decode_worker", "bench.fuzz_transfer")


def lie_here() -> None:
    from tests.standins.cuda import pools_lie_here
    from tests.standins.nccl import communicators_begin_here

    pools_lie_here()
    communicators_begin_here()


if sys.orig_argv[1:3] in [["-m", module] for module in HOLD_POOLS]:
    lie_here()
elif sys.orig_argv[1:3] == ["-m", "cli.launch"]:  # a fork server: what it forks runs a worker's module
    run_module = runpy.run_module

    def run_worker(name, *args, **kwargs):
        lie_here()
        return run_module(name, *args, **kwargs)

    runpy.run_module = run_worker
