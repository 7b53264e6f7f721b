"""First on PYTHONPATH, it has every worker process keep its pool on the stand-in's GPU; models compute on the CPU."""

import runpy
import sys

WORKERS = ("prefill_worker", "decode_worker")


def lie_here() -> None:
    from tests.standins.cuda import pools_lie_here
    from tests.standins.nccl import communicators_begin_here

    pools_lie_here()
    communicators_begin_here()


if sys.orig_argv[1:3] in [["-m", worker] for worker in WORKERS]:
    lie_here()
elif sys.orig_argv[1:3] == ["-m", "cli.launch"]:  # a fork server: what it forks runs a worker's module
    run_module = runpy.run_module

    def run_worker(name, *args, **kwargs):
        lie_here()
        return run_module(name, *args, **kwargs)

    runpy.run_module = run_worker
