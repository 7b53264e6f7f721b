"""Frames over one stream socket, with heartbeats; every wait on the peer has a deadline.

Owns the socket and one task that writes. Reads happen in the caller's task. Runs on any
asyncio loop. Knows frames, not what they mean.

Frames are queued by `send` and leave in order; a caller that is cancelled never leaves half
a frame on the wire. When nothing was sent for a third of the lease, a HEARTBEAT goes out; when
nothing arrives for a whole lease while somebody reads, the peer is lost. How long a frame may take
as a whole is not limited: `progress` shows whether any moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.frame import HEADER_BYTES, Frame, FrameType, Header
from kvtransfer.timing import Timing
from kvtransfer.wire import TURN_BYTES, PlainWire, TlsWire, Wire, readable, reason
from tandem.errors import FrameError, PeerLost, TransferError

MAX_QUEUED_FRAMES = 65536
"""A peer that lets this many answers pile up does not read; it is cut off."""
_SEND_BYTES = 1024 * 1024
"""Given to the wire at a time (about 0.2 ms); it takes what it has room for."""
_GATHER_BYTES = 64 * 1024
_LINGER_S = 0.5
_LINGER_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Outgoing:
    frame: bytes
    inline: Sequence[memoryview]
    sent: asyncio.Future[None] | None


class Connection:
    """`close` must be called once; until then the socket and the writing task live."""

    def __init__(self, sock: socket.socket, timing: Timing) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # the peer has gone: the first read will tell
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        """For credentials and descriptors; never for bytes."""
        self._wire: Wire = PlainWire(sock)
        self.progress = 0
        """Grows while anything but heartbeats moves: with each piece of payload that left, and each frame that came."""
        self.timing = timing
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[_Outgoing] = deque()
        self._wake = asyncio.Event()
        self._finishing = False
        self._broken: TransferError | None = None
        self._frame = bytearray()
        """What has come of the frame that is being read."""
        self._since_pause_bytes = 0
        self._patience_s: float | None = timing.lease_s
        self._writing: asyncio.Task[None] | None = None

    async def begin_tls(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """Switches to TLS; called before anything else. `server_name`: see `TlsWire`.

        The caller sets the deadline. Raises TransferError after the reason was sent to the peer.
        """
        try:
            wire = TlsWire(self.sock, context, server_name)
        except ValueError as error:  # the name came from the peer
            raise TransferError("no TLS with the peer: its address is no host name") from error
        try:
            await wire.shake_hands()
        except OSError as error:
            await self._linger()
            raise TransferError(f"no TLS with the peer: {reason(error)}") from error
        self._wire = wire

    def start(self) -> None:
        """Lets queued frames and heartbeats go out. Idempotent."""
        if self._writing is None:
            self._writing = self._loop.create_task(self._write_outbox(), name="kv-connection-write")

    def send(
        self, frame: Frame, inline: Sequence[memoryview] = (), *, urgent: bool = False
    ) -> asyncio.Future[None] | None:
        """Queues a frame, and payload to follow it. Never waits, never raises on a lost peer.

        An `urgent` one overtakes all that has not begun to leave: payload of others may need minutes on a slow wire.
        Returns a future only if there is payload: done when its memory may be reused; it
        carries PeerLost if the payload never left.
        """
        sent = self._loop.create_future() if inline else None
        if self._broken is None and len(self._outbox) >= MAX_QUEUED_FRAMES:
            self._break(PeerLost(f"the peer left {MAX_QUEUED_FRAMES} frames unread"))
        item = _Outgoing(frame.encode(), inline, sent)
        if self._broken is not None or self._finishing:
            _settle(item, self._broken or PeerLost("the connection is closing"))
            return sent
        if urgent:
            self._outbox.appendleft(item)
        else:
            self._outbox.append(item)
        self._wake.set()
        return sent

    def end_lease(self) -> None:
        """From now on silence is no loss: the reader waits for what the peer says last."""
        self._patience_s = None

    async def receive(self, first: bytes = b"") -> Frame:
        """The next frame, of which `first` was read before.

        Raises PeerLost, FrameError, HandshakeMismatch (another protocol version). A frame in which a peer
        fell silent is read on by the next call.
        """
        self._frame += first
        await self._gather(HEADER_BYTES)
        header = Header.decode(self._frame[:HEADER_BYTES])
        await self._gather(HEADER_BYTES + header.length)
        frame = header.complete(bytes(self._frame[HEADER_BYTES:]))
        self._frame.clear()
        self.progress += frame.type is not FrameType.HEARTBEAT
        return frame

    async def receive_some(self, view: memoryview) -> int:
        """Puts at least one byte into `view` and says how many. Raises PeerLost."""
        if self._since_pause_bytes >= TURN_BYTES:
            self._since_pause_bytes = 0
            await asyncio.sleep(0)
        try:
            count = await self._receive(view)
        except OSError as error:
            raise self._broken or PeerLost(f"connection failed: {reason(error)}") from error
        if count == 0:
            raise self._broken or PeerLost("the peer closed the connection")
        self._since_pause_bytes += count
        return count

    async def _gather(self, num_bytes: int) -> None:
        """Reads until `num_bytes` of the frame are there."""
        while (missing := num_bytes - len(self._frame)) > 0:
            piece = bytearray(min(missing, _GATHER_BYTES))
            count = await self.receive_some(memoryview(piece))
            self._frame += piece[:count]

    async def _receive(self, view: memoryview) -> int:
        """Waits for bytes. What has come counts, however late it is read: this side may have stood still itself."""
        patience_ends_s = None if self._patience_s is None else self._loop.time() + self._patience_s
        silent = False
        while (count := self._wire.receive_now(view)) is None:
            if silent:
                raise PeerLost("the peer went silent for longer than its lease")
            try:
                async with asyncio.timeout_at(patience_ends_s):
                    await readable(self.sock)
            except TimeoutError:
                silent = True
        return count

    def cut(self, error: TransferError) -> None:
        """Drops what is queued: the peer hears nothing more, and a reader here wakes with `error`. Idempotent."""
        self._break(error)

    async def finish(self) -> None:
        """Sends what is queued, then closes this side's half of the connection. Never raises."""
        self._finishing = True
        self._wake.set()
        self.start()
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=self.timing.stop_s)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        """Drops what is queued and closes the socket, even if cancelled. Idempotent."""
        try:
            if self._writing is not None:
                self._writing.cancel()
                await asyncio.wait({self._writing})
        finally:
            self._break(PeerLost("the connection was closed here"))
            self.sock.close()

    async def _linger(self) -> None:
        """Reads on for a moment: a socket closed with bytes unread would take back what was said last."""
        with contextlib.suppress(OSError):  # TimeoutError is one
            self.sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER_S):
                while await self._loop.sock_recv(self.sock, _LINGER_READ_BYTES):
                    pass

    async def _write_outbox(self) -> None:
        heartbeat = _Outgoing(Frame(FrameType.HEARTBEAT).encode(), (), None)
        try:
            while not (self._finishing and not self._outbox):
                if not self._outbox and not await self._woken():
                    await self._write(heartbeat)
                while self._outbox:
                    await self._write(self._outbox.popleft())
        except TimeoutError:
            self._break(PeerLost("the peer does not read"))
        except OSError as error:
            self._break(PeerLost(f"connection failed: {reason(error)}"))

    async def _woken(self) -> bool:
        self._wake.clear()
        try:
            async with asyncio.timeout(self.timing.heartbeat_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _write(self, item: _Outgoing) -> None:
        try:
            await self._send(memoryview(item.frame))
            for span in item.inline:
                await self._send(span, is_payload=True)
        except BaseException:
            _settle(item, PeerLost("the connection ended before the payload left"))
            raise
        _settle(item, None)

    async def _send(self, data: memoryview, *, is_payload: bool = False) -> None:
        """All of it; each part of it within a lease. The loop has its turn in between, however fast the wire is."""
        while True:
            data = data[await self._wire.send_some(data[:_SEND_BYTES], self.timing.lease_s) :]
            self.progress += is_payload
            if not len(data):
                return
            await asyncio.sleep(0)

    def _break(self, error: TransferError) -> None:
        """Nothing more is sent; a reader of this connection wakes with `error`."""
        if self._broken is not None:
            return
        self._broken = error
        for item in self._outbox:
            _settle(item, error)
        self._outbox.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


def _settle(item: _Outgoing, error: TransferError | None) -> None:
    if item.sent is None or item.sent.done():
        return
    if error is None:
        item.sent.set_result(None)
        return
    item.sent.set_exception(error)
    item.sent.exception()  # a caller that was cancelled never collects it


def expect(frame: Frame, wanted: FrameType) -> Frame:
    """Returns the frame if its type is the wanted type. Raises FrameError."""
    if frame.type is not wanted:
        raise FrameError(f"{frame.type.name} came where {wanted.name} was due")
    return frame
