"""A sender that speaks the wire by hand, so that it can say what no sender of ours would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from kvtransfer.base import Offer
from kvtransfer.connection import Connection, expect
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handshake import Hello, agreed_verify
from kvtransfer.messages import Write
from kvtransfer.pool import Pool
from kvtransfer.transport import SendingLane
from kvtransfer.transports import named
from tandem.types import BlockId
from tests.kv_ends import QUICK
from tests.transports import PRINTS, WAYS, TestPool, make_pool


class RawSender:
    """Says any frame, and hears the answers; payload goes by the true lane."""

    def __init__(self, connection: Connection, lane: SendingLane, pool: TestPool) -> None:
        self.connection = connection
        self._lane = lane
        self._pool = pool

    def say(self, kind: FrameType, number: int = 0, payload: bytes = b"", seq: int = 0, inline: bytes = b"") -> None:
        self.connection.send(Frame(kind, number, seq, payload), [memoryview(inline)] if inline else ())

    async def put(self, number: int, block_id: int, data: bytes, *, spoil: bool = False) -> int:
        """One block at position 0, as the first WRITE; a spoilt one is announced with another checksum.

        Returns what it was announced with.
        """
        self._pool.blocks[0] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        loan = await self._lane.reserve(1)
        (checksum,) = await self._lane.place((BlockId(0),), (BlockId(block_id),), loan)
        checksum ^= spoil
        write = Frame(FrameType.WRITE, number, payload=Write(0, (checksum,)).encode())
        sent = self._lane.announce(self.connection, write, (BlockId(0),), loan)
        if sent is not None:
            await sent
        return checksum

    async def hear(self) -> Frame:
        while (frame := await self.connection.receive()).type is FrameType.HEARTBEAT:
            pass
        return frame

    async def ask(self, *args, **kwargs) -> Frame:
        self.say(*args, **kwargs)
        return await self.hear()

    async def open(self, offer: Offer) -> int:
        number = int(offer.transfer_id, 16)
        assert (await self.ask(FrameType.OPEN, number, offer.ticket)).type is FrameType.OPEN_OK
        return number


@asynccontextmanager
async def raw(offer: Offer, transport: str, hello: Hello | None = None) -> AsyncIterator[RawSender]:
    """`async with raw(offer, "tcp") as peer`."""
    pool = make_pool(transport)
    local = Pool(pool.memory, PRINTS)
    (way,) = named((transport,))
    sock, lane = await way.dial(local, Endpoint.decode(offer.endpoint).reach[transport], None)
    connection = Connection(sock, QUICK)
    try:
        await lane.secure(connection)
        connection.start()
        ours = hello or lane.hello()
        connection.send(Frame(FrameType.HELLO, payload=ours.encode()))
        theirs = Hello.decode(expect(await lane.receive_hello(connection), FrameType.HELLO).payload)
        if hello is None:
            lane.attach(theirs, agreed_verify(ours, theirs))
            await lane.prepare()
        yield RawSender(connection, lane, pool)
    finally:
        lane.close()
        await lane.closed()
        if WAYS[transport].peer_writes:
            connection.send(Frame(FrameType.BYE))
            await connection.finish()
        await connection.close()
        local.close()
        pool.close()
