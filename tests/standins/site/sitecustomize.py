"""First on PYTHONPATH, it has every worker process keep its pool on the stand-in's GPU; models compute on the CPU."""

import sys

if sys.orig_argv[1:3] in (["-m", "prefill_worker"], ["-m", "decode_worker"]):
    from tests.standins.cuda import pools_lie_here

    pools_lie_here()
