"""One side of a hand-off as a process of its own, to be killed or stopped by a test.

    kv_peer_process.py receive TRANSPORT LEASE_S      prints an offer, then `committed` or `failed`
    kv_peer_process.py send|rude TRANSPORT LEASE_S    reads an offer; writes half a block, says so and waits
                                                      for a line; `rude` drops the socket without a BYE

Blocks are 256 bytes, pools 16 blocks; all lines are on stdin and stdout.
"""

import asyncio
import mmap
import os
import secrets
import socket
import sys
import threading
import time

import torch

from kvtransfer.base import BlockRef, Fingerprints, PoolMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from kvtransfer.transports import choose
from tandem.clock import MonotonicClock
from tandem.kv_layout import DType, KvLayout

PRINTS = Fingerprints("model-a", KvLayout(2, 1, 4, 8, DType.BFLOAT16))
HALF = 128


def make_memory():
    fd = os.memfd_create("test-pool")
    os.ftruncate(fd, 16 * 256)
    blocks = torch.frombuffer(mmap.mmap(fd, 16 * 256), dtype=torch.uint8).view(16, 256)
    return PoolMemory(blocks.fill_(0xAB), fd, secrets.token_hex(16))


def say(line):
    print(line, flush=True)


class Listener:
    def on_receiving(self):
        say("receiving")

    def on_committed(self, first_token_payload):
        say(f"committed {first_token_payload.hex()}")

    def on_failed(self, error):
        say(f"failed {error}")

    def on_writer_stopped(self):
        say("writer_stopped")


class HalfLane:
    """Writes half a block, then waits: a process caught in the middle."""

    def __init__(self, lane):
        self._lane = lane
        self.name = lane.name
        self.close, self.closed = lane.close, lane.closed
        self.reserve = lane.reserve
        self._go = threading.Event()
        self.release = self._go.set

    async def place(self, sources, targets, room):
        if self.name == "shm":
            self._lane._peer.spans((targets[0].block_id,))[0][:HALF] = bytes([0xAB]) * HALF
        if self.name == "nixl":
            await self._lane._agent.start(lambda: self._write_half(targets[0].block_id))
        if self.name != "tcp":
            say("half written")
            await asyncio.get_running_loop().run_in_executor(None, self._go.wait)
        return await self._lane.place(sources, targets, room)

    def announce(self, sink, write, sources, room):
        return self._lane.announce(HalfSink(sink), write, sources, room)

    def _write_half(self, target):
        agent, (metadata, region) = self._lane._agent, self._lane._peer
        nixl = agent._nixl
        ours = nixl.get_xfer_descs([(agent.region.address, HALF, 0)], "DRAM")
        theirs = nixl.get_xfer_descs([(region.address + target * 256, HALF, 0)], "DRAM")
        transfer = nixl.initialize_xfer("WRITE", ours, theirs, nixl.add_remote_agent(metadata))
        state = nixl.transfer(transfer)
        while state == "PROC":
            time.sleep(0.001)
            state = nixl.check_xfer_state(transfer)
        assert state == "DONE"
        transfer.release()


class HalfSink:
    """Half of what follows a frame."""

    def __init__(self, sink):
        self._sink = sink

    def send(self, frame, inline=()):
        if inline:
            asyncio.get_running_loop().call_later(0.05, say, "half written")
        return self._sink.send(frame, [span[:HALF] for span in inline])


async def read_line():
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def receive(transport, timing):
    receiver = KvReceiver(make_memory(), PRINTS, MonotonicClock(), (transport,), "127.0.0.1", timing=timing)
    await receiver.start()
    offer = receiver.offer((BlockRef(3, 7), BlockRef(1, 7)), Listener(), 30.0)
    say(f"{offer.ticket.hex()} {offer.endpoint.hex()}")
    await read_line()
    await receiver.stop()


async def send(transport, timing, *, rude):
    sender = KvSender(make_memory(), PRINTS, MonotonicClock(), transport, timing=timing)
    ticket, endpoint = map(bytes.fromhex, (await read_line()).split())
    handoff = await sender.open(ticket, endpoint, 5.0)
    handoff._lane = lane = HalfLane(handoff._lane)
    pushing = asyncio.ensure_future(handoff.push(0, (0,)))
    await read_line()
    if rude:
        handoff._sink._connection.sock.shutdown(socket.SHUT_RDWR)
        say("dropped")
        await read_line()
    lane.release()
    await asyncio.wait({pushing})
    say(f"push ended {pushing.exception()}")
    await sender.stop()


async def main():
    role, transport, lease_s = sys.argv[1:]
    timing = Timing(lease_s=float(lease_s), reply_s=2.0, stop_s=1.0)
    choose(transport, "cpu")  # what takes its time is loaded before a peer waits, as in a worker
    if role == "receive":
        await receive(transport, timing)
    else:
        await send(transport, timing, rude=role == "rude")


asyncio.run(main())
