"""A sender by NCCL as a process of its own, forked as in `kv_peer`, over the stand-ins.

Hears an offer, pushes blocks 0 and 1 of bytes 0xAB, commits, stops, ends.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection as Pipe

from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from shell.clock import MonotonicClock
from tandem.types import BlockId
from tests.faults.kv_peer import FILL, PATIENCE_S, Forked, heard
from tests.standins.cuda import DevicePool
from tests.standins.nccl import standin_nccl
from tests.transports import PRINTS


async def _push_two(pipe: Pipe, abort_s: float) -> None:
    nccl = standin_nccl()
    pool = DevicePool(16, PRINTS.layout.block_bytes)
    pool.blocks.fill_(FILL)
    known = (nccl.transport(abort_s=abort_s),)
    sender = KvSender(pool.memory, PRINTS, MonotonicClock(), "nccl", timing=Timing(lease_s=PATIENCE_S), known=known)
    ticket, endpoint = await heard(pipe)
    handoff = await sender.open(ticket, endpoint, PATIENCE_S)
    await handoff.push(0, (BlockId(0), BlockId(1)))
    await handoff.commit(b"")
    await sender.stop()


def _run(pipe: Pipe, abort_s: float, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)  # before the stand-in is loaded, which reads its settings there
    asyncio.run(_push_two(pipe, abort_s))


def nccl_peer(abort_s: float, settings: Mapping[str, str]) -> Forked:
    """`settings` are those of the stand-in in the other process."""
    return Forked(_run, abort_s, {f"STANDIN_NCCL_{name}": value for name, value in settings.items()})
