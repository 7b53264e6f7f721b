"""A wire may be slow: a hand-off fails when nothing moves any more, not when it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from kvtransfer.connection import Connection
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handoff import OutgoingHandoff
from kvtransfer.messages import encode_window
from kvtransfer.pool import Pool
from kvtransfer.ticket import Ticket
from kvtransfer.timing import Timing
from kvtransfer.transport import SendingLane
from tandem.errors import PeerLost
from tandem.types import Incarnation
from tests.kv_ends import QUICK, RECEIVED, Recorder, paired, push_and_commit, refs_of, rerouted
from tests.manual_clock import ManualClock
from tests.raw_sender import raw
from tests.transports import PRINTS

NUM_LOOKS = 5


class StillConnection:
    """Takes frames; nothing moves on it."""

    timing = Timing(reply_s=0.02)
    progress = 3

    def send(self, frame: Frame, inline: Any = (), *, urgent: bool = False) -> None:
        pass


class MovingConnection(StillConnection):
    """Progress has grown with every look; a test can wait for `NUM_LOOKS` looks."""

    def __init__(self) -> None:
        self._looks = count(1)
        self.enough = asyncio.Event()

    @property
    def progress(self) -> int:
        look = next(self._looks)
        if look >= NUM_LOOKS:
            self.enough.set()
        return look


@pytest.fixture
def open_handoff(make_pool: Callable[..., Any]) -> Callable[..., OutgoingHandoff]:
    def opened(connection: Any, window: int = 1) -> OutgoingHandoff:
        pool = Pool(make_pool().memory, PRINTS)
        ticket = Ticket(7, Incarnation("ab" * 16), bytes(16), "cd" * 16, 1000, 0, refs_of(range(2)))
        lane = SendingLane(pool)
        lane.name = "slow"
        handoff = OutgoingHandoff(ticket, connection, lane, pool, ManualClock(), lambda _: None)
        handoff.handle(Frame(FrameType.OPEN_OK, 7, payload=encode_window(window)))
        return handoff

    return opened


async def test_credit_may_come_late_while_others_move_on_the_connection(open_handoff: Callable[..., Any]) -> None:
    moving = MovingConnection()
    handoff = open_handoff(moving)
    await handoff.push(0, (0,))
    pushing = asyncio.create_task(handoff.push(1, (1,)))
    await moving.enough.wait()
    assert not pushing.done()
    handoff.handle(Frame(FrameType.WRITE_OK, 7))
    await pushing


async def test_a_connection_on_which_nothing_moves_fails_the_hand_off(open_handoff: Callable[..., Any]) -> None:
    handoff = open_handoff(StillConnection())
    await handoff.push(0, (0,))
    with pytest.raises(PeerLost, match="no answer"):
        await handoff.push(1, (1,))


async def test_heartbeats_are_no_progress_and_answers_and_payload_are(recorder: Recorder) -> None:
    async with paired("tcp", QUICK) as pair:
        offer = pair.offer(recorder, (3,))
        async with raw(offer, "tcp") as peer:
            connection: Connection = peer.connection
            before = connection.progress
            while (await connection.receive()).type is not FrameType.HEARTBEAT:
                pass
            assert connection.progress == before
            peer.say(FrameType.OPEN, int(offer.transfer_id, 16), offer.ticket)
            assert (await peer.hear()).type is FrameType.OPEN_OK
            assert connection.progress == before + 1
            sent = connection.send(Frame(FrameType.WRITE), [memoryview(b"payload")])
            assert sent is not None
            await sent
            assert connection.progress == before + 2


class SlowProxy:
    """Between a sender and a receiver: what the sender says goes on in pieces, each after a pause."""

    def __init__(self, host: str, port: int, piece_bytes: int, pause_s: float) -> None:
        self._peer = (host, port)
        self._piece_bytes, self._pause_s = piece_bytes, pause_s

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1")
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection(*self._peer)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass(reader, onward, self._pause_s))
            tasks.create_task(self._pass(there, writer, 0.0))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float) -> None:
        while data := await reader.read(self._piece_bytes):
            await asyncio.sleep(pause_s)
            writer.write(data)
        writer.close()


async def test_a_hand_off_over_a_slow_wire_takes_as_long_as_it_takes(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block in each WRITE, about one WRITE in each pause: in all several times what an answer may take."""
    monkeypatch.setattr("kvtransfer.transport.PIECE_BYTES", 1)
    async with paired("tcp", Timing(lease_s=20.0, reply_s=2.0)) as pair:
        offer = pair.offer(recorder, tuple(range(12)))
        fields = Endpoint.decode(offer.endpoint).reach["tcp"]
        async with SlowProxy(fields["host"], int(fields["port"]), 400, pause_s=0.5) as port:
            handoff = await pair.open(rerouted(offer, "tcp", port=str(port)))
            assert (await push_and_commit(handoff, range(12))).num_blocks == 12
            assert recorder.calls == RECEIVED
            await pair.sender.stop()


async def test_an_urgent_frame_overtakes_what_waits_to_leave(recorder: Recorder) -> None:
    async with paired("tcp") as pair:
        offer = pair.offer(recorder, (3,))
        async with raw(offer, "tcp") as peer:
            peer.connection.send(Frame(FrameType.ABORT, 5))
            peer.connection.send(Frame(FrameType.OPEN, int(offer.transfer_id, 16), payload=offer.ticket), urgent=True)
            assert [(await peer.hear()).type for _ in range(2)] == [FrameType.OPEN_OK, FrameType.DRAINED]
