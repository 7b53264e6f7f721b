"""First on PYTHONPATH, it has every worker process keep its pool on the stand-in's GPU; models compute on the CPU.

`tests.fuzz.transfer`, which has both sides in its own process, then reaches cuda_ipc and nccl too.
"""

import sys

HOLD_POOLS = ("prefill_worker", "decode_worker", "tests.fuzz.transfer")

if sys.orig_argv[1:3] in [["-m", module] for module in HOLD_POOLS]:
    from tests.standins.cuda import pools_lie_here
    from tests.standins.nccl import communicators_begin_here

    pools_lie_here()
    communicators_begin_here()
