"""A prefill worker's process that opens one hand-off, writes one block, says so, and then does nothing for ever."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection as Pipe

import torch

from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.sender import KvSender
from shell.clock import MonotonicClock
from tandem.types import BlockId, new_incarnation
from tests.faults.kv_peer import Forked

OPENED = "opened"
_OPEN_WITHIN_S = 20.0


async def _open(pipe: Pipe, transport: str, ticket: bytes, endpoint: bytes, prints: Fingerprints) -> None:
    blocks = torch.zeros(4, prints.layout.block_bytes, dtype=torch.uint8)
    sender = KvSender(PoolMemory(blocks, None, new_incarnation()), prints, MonotonicClock(), transport)
    handoff = await sender.open(ticket, endpoint, _OPEN_WITHIN_S)
    await handoff.push(0, (BlockId(0),))
    pipe.send(OPENED)
    await asyncio.Event().wait()


def _run(pipe: Pipe, *args: object) -> None:
    asyncio.run(_open(pipe, *args))  # type: ignore[arg-type]


def idle_writer(transport: str, ticket: bytes, endpoint: bytes, prints: Fingerprints) -> Forked:
    return Forked(_run, transport, ticket, endpoint, prints)
