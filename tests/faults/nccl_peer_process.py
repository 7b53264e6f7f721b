"""A sender by NCCL as a process of its own, over the stand-ins; what these do is set in its environment.

nccl_peer_process.py ABORT_S     reads an offer, pushes blocks 0 and 1 of bytes 0xAB, commits, stops
"""

import asyncio
import sys
from dataclasses import replace

from kvtransfer.base import Fingerprints
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from tandem.clock import MonotonicClock
from tandem.kv_layout import DType, KvLayout
from tests.standins.cuda import DevicePool
from tests.standins.nccl import QUICK, standin_nccl

PRINTS = Fingerprints("model-a", KvLayout(2, 1, 4, 8, DType.BFLOAT16))


async def main():
    nccl = standin_nccl()
    pool = DevicePool(16, 256)
    pool.blocks.fill_(0xAB)
    known = (nccl.transport(replace(QUICK, abort_s=float(sys.argv[1]))),)
    sender = KvSender(pool.memory, PRINTS, MonotonicClock(), "nccl", timing=Timing(lease_s=10.0), known=known)
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    ticket, endpoint = map(bytes.fromhex, line.split())
    handoff = await sender.open(ticket, endpoint, 10.0)
    await handoff.push(0, (0, 1))
    await handoff.commit(b"")
    await sender.stop()


asyncio.run(main())
