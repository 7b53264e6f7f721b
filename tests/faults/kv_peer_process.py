"""One side of a hand-off as a process of its own, forked as in `kv_peer`, to be killed or stopped by a test.

    receiving     says its offer, then the calls of its listener
    sending       hears an offer; writes half a block, says so and waits to be told to go on; says how the push ended
    rude          the same, but first drops the socket without a BYE, says so and waits once more

What it says over its pipe are strings, but for the offer.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from shell.clock import MonotonicClock
from tandem.types import BlockId
from tests.faults.kv_peer import FILL, PATIENCE_S, TARGETS, Forked, heard
from tests.kv_ends import Recorder, refs_of
from tests.transports import PRINTS, make_pool

HALF = PRINTS.layout.block_bytes // 2
PATIENT = Timing(lease_s=60.0, reply_s=60.0, stop_s=0.5)
"""Neither side notices a silence: what else ends a hand-off is seen as such."""


class _Listener(Recorder):
    """Says each call."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe

    def _add(self, call: str) -> None:
        super()._add(call)
        self._pipe.send(f"committed {self.payload.hex()}" if self.payload is not None else call)


class _HalfLane:
    """Writes half a block, then waits: a process caught in the middle."""

    def __init__(self, lane: Any, pipe: Pipe) -> None:
        self._lane = lane
        self._pipe = pipe
        self.name = lane.name
        self.close, self.closed = lane.close, lane.closed
        self.reserve, self.piece_bytes = lane.reserve, lane.piece_bytes
        self._go = threading.Event()
        self.release = self._go.set

    async def place(self, sources: Any, targets: Sequence[BlockId], room: Any) -> Any:
        if self.name == "shm":
            self._lane._peer.parts[0].spans((targets[0],))[0][:HALF] = bytes([FILL]) * HALF
        if self.name == "nixl":
            await self._lane._agent.start(lambda: self._write_half(targets[0]))
        if self.name != "tcp":
            self._pipe.send("half written")
            await asyncio.get_running_loop().run_in_executor(None, self._go.wait)
        return await self._lane.place(sources, targets, room)

    def announce(self, sink: Any, write: Any, sources: Any, room: Any) -> Any:
        return self._lane.announce(_HalfConnection(sink, self._pipe), write, sources, room)

    def _write_half(self, target: BlockId) -> None:
        agent, (metadata, region) = self._lane._agent, self._lane._peer
        nixl = agent._nixl
        ours = nixl.get_xfer_descs([(agent.region.addresses[0], HALF, 0)], "DRAM")
        theirs = nixl.get_xfer_descs([(region.addresses[0] + target * 2 * HALF, HALF, 0)], "DRAM")
        transfer = nixl.initialize_xfer("WRITE", ours, theirs, nixl.add_remote_agent(metadata))
        state = nixl.transfer(transfer)
        while state == "PROC":
            time.sleep(0.001)
            state = nixl.check_xfer_state(transfer)
        assert state == "DONE"
        transfer.release()


class _HalfConnection:
    """Half of what follows a frame."""

    def __init__(self, sink: Any, pipe: Pipe) -> None:
        self._sink = sink
        self._pipe = pipe

    def send(self, frame: Any, inline: Sequence[memoryview] = ()) -> Any:
        if inline:
            asyncio.get_running_loop().call_later(0.05, self._pipe.send, "half written")
        return self._sink.send(frame, [span[:HALF] for span in inline])


async def _receive(pipe: Pipe, transport: str) -> None:
    pool = make_pool(transport)
    receiver = KvReceiver(pool.memory, PRINTS, MonotonicClock(), (transport,), "127.0.0.1", timing=PATIENT)
    await receiver.start()
    offer = receiver.offer(refs_of(TARGETS), _Listener(pipe), PATIENCE_S)
    pipe.send((offer.ticket, offer.endpoint))
    await heard(pipe)
    await receiver.stop()


async def _send(pipe: Pipe, transport: str, *, rude: bool) -> None:
    pool = make_pool(transport)
    pool.blocks.fill_(FILL)
    sender = KvSender(pool.memory, PRINTS, MonotonicClock(), transport, timing=PATIENT)
    ticket, endpoint = await heard(pipe)
    handoff: Any = await sender.open(ticket, endpoint, PATIENCE_S)
    handoff._lane = lane = _HalfLane(handoff._lane, pipe)
    pushing = asyncio.ensure_future(handoff.push(0, (BlockId(0),)))
    await heard(pipe)
    if rude:
        handoff._connection.sock.shutdown(socket.SHUT_RDWR)
        pipe.send("dropped")
        await heard(pipe)
    lane.release()
    await asyncio.wait({pushing})
    pipe.send(f"push ended {pushing.exception()}")
    await sender.stop()


def _run(pipe: Pipe, role: str, transport: str) -> None:
    asyncio.run(_receive(pipe, transport) if role == "receiving" else _send(pipe, transport, rude=role == "rude"))


def half_peer(role: str, transport: str) -> Forked:
    """In the test: the other process."""
    return Forked(_run, role, transport)
