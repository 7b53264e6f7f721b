"""The receiver's side of one connection: handshake, frames in, answers out, and its end.

    shake hands → serve frames until BYE, EOF, silence or a bad frame → fail what is open
        → (peers that write by themselves) wait for BYE or the proof of death → release

Owns the connection. Judges nothing itself: offers live in the table, bytes in the pool.
"""

from __future__ import annotations

import asyncio

from kvtransfer.base import SenderGaveUp
from kvtransfer.connection import Connection, expect
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handshake import Hello, agreed_verify, compare
from kvtransfer.messages import OUT_OF_MEMORY, Commit, Write, encode_error, encode_window
from kvtransfer.offers import OfferTable
from kvtransfer.pool import Pool
from kvtransfer.transport import ReceivingLane
from tandem.errors import FrameError, HandshakeMismatch, PeerLost, TransferError
from tandem.logger import get_logger
from tandem.types import BlockId

WINDOW_WRITES = 16
"""WRITE frames that a sender may have unanswered."""

_log = get_logger(__name__)


class Session:
    """A sender's connection; the `Writer` of the offers that this sender opened."""

    def __init__(
        self,
        connection: Connection,
        lane: ReceivingLane,
        pool: Pool,
        table: OfferTable,
    ) -> None:
        """The lane is this session's to close."""
        self._connection = connection
        self.established = False
        """Whether hands were shaken."""
        self._lane = lane
        self._pool = pool
        self._table = table
        self._open: set[int] = set()
        self.last_shown = 0
        """Which of all tickets that the table accepted was the last one of this sender; 0 = it has shown none."""
        self._taking: int | None = None
        """The transfer whose WRITE is being received, verified and settled."""
        self._peer_stopped = False

    @property
    def transport(self) -> str:
        """The name of the lane's."""
        return self._lane.name

    @property
    def is_idle(self) -> bool:
        """Whether hands were shaken and no transfer is open."""
        return self.established and not self._open

    def stop_writing(self, number: int, error: TransferError) -> bool:
        """Tells the sender to stop. True unless bytes can still arrive in the blocks."""
        if not self._peer_stopped:
            self._connection.send(Frame(FrameType.WITHDRAWN, number, payload=encode_error(error)))
        return self._taking != number and (self._peer_stopped or not self._lane.peer_writes)

    async def run(self) -> None:
        """Serves the connection to its end and closes it; a cancelled run closes it too."""
        try:
            await self._establish()
            await self._release(await self._serve())
        except TransferError as error:
            _log.warning("kv handshake failed", transport=self._lane.name, error=str(error)[:300])  # quotes a stranger
            await self._connection.finish()
        finally:
            self._lane.close()
            await self._connection.close()
            await self._lane.closed()

    async def finish(self) -> None:
        """Sends what is queued and tells the peer that nothing follows, so that it says BYE."""
        await self._connection.finish()

    async def _establish(self) -> None:
        handshake_s = self._connection.timing.lease_s
        try:
            async with asyncio.timeout(handshake_s):
                await self._lane.secure(self._connection)
                await self._shake_hands()
        except TimeoutError:
            raise PeerLost(f"no handshake within {handshake_s:g} s") from None
        self.established = True

    async def _shake_hands(self) -> None:
        ours = self._lane.hello()
        try:
            theirs = Hello.decode(expect(await self._connection.receive(), FrameType.HELLO).payload)
            compare(ours, theirs)
        except HandshakeMismatch:
            self._connection.send(Frame(FrameType.HELLO, payload=ours.encode()))
            raise
        self._lane.attach(theirs, agreed_verify(theirs, ours))
        await self._lane.prepare()
        ours = self._lane.hello()
        self._lane.send_hello(self._connection, Frame(FrameType.HELLO, payload=ours.encode()))
        self._connection.start()

    async def _serve(self) -> TransferError:
        try:
            while True:
                frame = await self._connection.receive()
                if frame.type is FrameType.BYE:
                    self._peer_stopped = True
                    return PeerLost("the sender closed the connection")
                await self._handle(frame)
        except TransferError as error:
            return error
        except Exception as error:  # noqa: BLE001 - its blocks wait for the orderly end all the same
            _log.exception("kv session ended by our own bug")
            return TransferError(f"the receiver's end of the connection broke: {type(error).__name__}")

    async def _handle(self, frame: Frame) -> None:
        match frame.type:
            case FrameType.HEARTBEAT:
                pass
            case FrameType.OPEN:
                self._show(frame)
            case FrameType.WRITE:
                await self._write(frame)
            case FrameType.COMMIT:
                self._commit(frame)
            case FrameType.ABORT:
                self._aborted(frame.transfer)
            case FrameType.DRAINED:
                self._writer_stopped(frame.transfer)
            case _:
                raise FrameError(f"a sender does not say {frame.type.name}")

    def _show(self, frame: Frame) -> None:
        number = frame.transfer
        try:
            self._table.show(number, frame.payload, self, self._lane.places)
        except TransferError as error:
            self._connection.send(Frame(FrameType.REFUSED, number, payload=encode_error(error)))
            return
        self._open.add(number)
        self._lane.expect(len(self._open))
        self.last_shown = self._table.num_shown
        self._connection.send(Frame(FrameType.OPEN_OK, number, payload=encode_window(WINDOW_WRITES)))

    async def _write(self, frame: Frame) -> None:
        number, write = frame.transfer, Write.decode(frame.payload)
        num_bytes = write.num_blocks * self._pool.block_bytes
        blocks = self._table.claim(number, frame.seq, write) if number in self._open else None
        if blocks is None:  # late, or wrong
            await self._drop_payload(write)
            return
        self._taking = number
        try:
            await self._lane.receive(self._connection, blocks, num_bytes, lambda: self._table.is_receiving(number))
            await self._judge(number, write, blocks)
        finally:
            self._taking = None
            if not self._lane.peer_writes:
                self._table.writer_stopped(number)
        if self._table.is_receiving(number):
            self._connection.send(Frame(FrameType.WRITE_OK, number, frame.seq))

    async def _drop_payload(self, write: Write) -> None:
        """What follows the WRITE has to leave the connection, for the next frame to be one."""
        num_bytes = write.num_blocks * self._pool.block_bytes
        await self._lane.receive(self._connection, (), num_bytes, lambda: False)

    async def _judge(self, number: int, write: Write, blocks: tuple[BlockId, ...]) -> None:
        """Verifies what was received and brings it into the pool, or fails the offer."""
        try:
            if self._table.is_receiving(number) and self._table.verify(
                number, write, await self._lane.checksums(blocks)
            ):
                await self._lane.settle(blocks)
        except TransferError as error:
            self._table.fail(number, error)
        except MemoryError:
            self._table.fail(number, TransferError(OUT_OF_MEMORY))

    def _commit(self, frame: Frame) -> None:
        number, commit = frame.transfer, Commit.decode(frame.payload)
        try:
            if number not in self._open:
                raise TransferError(f"transfer {number:016x} is not open on this connection")
            self._table.commit(number, commit)
        except TransferError as error:
            self._connection.send(Frame(FrameType.FAILED, number, payload=encode_error(error)))
            return
        self._open.discard(number)
        self._lane.expect(len(self._open))
        self._connection.send(Frame(FrameType.COMMITTED, number))

    def _aborted(self, number: int) -> None:
        if number in self._open:
            self._table.fail(number, SenderGaveUp("the sender gave up"))
        self._writer_stopped(number)
        self._connection.send(Frame(FrameType.DRAINED, number))

    def _writer_stopped(self, number: int) -> None:
        if number in self._open:
            self._open.discard(number)
            self._lane.expect(len(self._open))
            self._table.writer_stopped(number)

    async def _release(self, error: TransferError) -> None:
        """Fails what is open, then waits until no write of the peer can follow."""
        for number in tuple(self._open):
            self._table.fail(number, error)
        if self._open and self._lane.peer_writes and not self._peer_stopped:
            await self._until_peer_stopped()
        for number in tuple(self._open):
            self._writer_stopped(number)

    async def _until_peer_stopped(self) -> None:
        self._connection.end_lease()
        await self._connection.finish()
        dead = asyncio.ensure_future(self._lane.peer_dead())
        said = asyncio.ensure_future(self._hear_out())
        try:
            await asyncio.wait({dead, said}, return_when=asyncio.FIRST_COMPLETED)
            if dead.done() or not said.result():
                await dead
        finally:
            dead.cancel()
            said.cancel()
            await asyncio.wait({dead, said})

    async def _hear_out(self) -> bool:
        """Takes the peer's last words. Whether BYE was among them; False = none will follow."""
        try:
            while (frame := await self._connection.receive()).type is not FrameType.BYE:
                if frame.type in {FrameType.ABORT, FrameType.DRAINED}:
                    self._writer_stopped(frame.transfer)
                elif frame.type is FrameType.WRITE:
                    await self._drop_payload(Write.decode(frame.payload))
        except TransferError:
            return False
        return True
