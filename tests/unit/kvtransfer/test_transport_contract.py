"""A transport that the product does not have: two-sided, and with a digest of its own. It touches no other file."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvtransfer.connection import Connection
from kvtransfer.frame import Frame
from kvtransfer.handshake import Hello
from kvtransfer.pool import Pool
from kvtransfer.ring import Loan
from kvtransfer.rows import XXH3
from kvtransfer.transport import Acceptor, Fields, ListenOptions, ReceivingLane, SendingLane, TransportStatus
from kvtransfer.transports import TRANSPORTS, named, tcp
from tandem.errors import ChecksumMismatch, HandshakeMismatch, TransferError
from tandem.security.tls import ClientTls
from tandem.types import BlockId
from tests.kv_ends import FAILED, Recorder, ends, logged
from tests.transports import SharedPool

NAME = "rendezvous"
SUM = "sum-64"
HOST = named(("shm", "tcp"))
"""Transports that any pool has."""


class Wires:
    """What a collective library would be: payload moves only while both sides are in a call for it."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[bytes]] = {}
        self.num_blocks = 0
        self.spoil = False

    def queue(self, communicator: str) -> asyncio.Queue[bytes]:
        return self._queues.setdefault(communicator, asyncio.Queue(1))


def sums(pool: Pool, blocks: Sequence[BlockId]) -> tuple[int, ...]:
    """As a kernel on a device would: independent of the order of bytes."""
    return tuple(int(pool.rows.array[block].sum(dtype="uint64")) for block in blocks)


class RendezvousSendingLane(SendingLane):
    name = NAME

    def __init__(self, pool: Pool, wires: Wires, verify: tuple[str, ...]) -> None:
        super().__init__(pool)
        self.verify = verify
        self.details = {"communicator": secrets.token_hex(4)}
        self._wires = wires
        self._digest = ""

    def attach(self, theirs: Hello, verify: str) -> None:
        assert theirs.details == {"posted": "yes"}
        self._digest = verify

    async def place(self, sources: Sequence[BlockId], targets: Sequence[BlockId], loan: Loan) -> tuple[int, ...]:
        return sums(self._pool, sources) if self._digest == SUM else await super().place(sources, targets, loan)

    def announce(
        self, connection: Connection, write: Frame, sources: Sequence[BlockId], loan: Loan
    ) -> asyncio.Future[None] | None:
        connection.send(write)
        return asyncio.ensure_future(self._send(sources))

    async def _send(self, sources: Sequence[BlockId]) -> None:
        for source in sources:
            data = bytes(self._pool.rows.array[source])
            await self._wires.queue(self.details["communicator"]).put(b"\0" + data[1:] if self._wires.spoil else data)
            self._wires.num_blocks += 1


class RendezvousReceivingLane(ReceivingLane):
    name = NAME

    def __init__(self, pool: Pool, wires: Wires, verify: tuple[str, ...]) -> None:
        super().__init__(pool)
        self.verify = verify
        self.details = {"posted": "yes"}
        self._wires = wires
        self._digest = self._communicator = ""

    def attach(self, theirs: Hello, verify: str) -> None:
        self._communicator = theirs.details["communicator"]
        self._digest = verify

    async def receive(
        self, connection: Connection, blocks: Sequence[BlockId], num_bytes: int, wanted: Callable[[], bool]
    ) -> None:
        for i in range(num_bytes // self._pool.block_bytes):
            data = await self._wires.queue(self._communicator).get()
            if blocks and wanted():
                self._pool.rows.spans(blocks[i : i + 1])[0][:] = data

    async def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        return sums(self._pool, blocks) if self._digest == SUM else await super().checksums(blocks)


class RendezvousTransport:
    """Implements `transport.Transport`."""

    name = NAME
    splits = False
    gpu_each = False
    dial_s: float | None = None

    def __init__(self, wires: Wires, verify: tuple[str, ...] = (SUM,), why_not: str | None = None) -> None:
        self._wires = wires
        self._verify = verify
        self._why_not = why_not

    def probe(self, device: torch.device) -> TransportStatus:
        return TransportStatus(NAME, True, f"works for {device}")

    def listen(self, pool: Pool, options: ListenOptions) -> Acceptor:
        sock = tcp.listen(options.host)
        fields = {"at": "{}/{}".format(*sock.getsockname())}
        return Acceptor(sock, fields, lambda _: RendezvousReceivingLane(pool, self._wires, self._verify))

    def unreachable(self, pool: Pool, fields: Fields) -> str | None:
        return self._why_not

    async def dial(self, pool: Pool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        host, _, port = fields["at"].partition("/")
        return await tcp.dial(host, int(port)), RendezvousSendingLane(pool, self._wires, self._verify)


@pytest.fixture
def wires() -> Wires:
    return Wires()


def joined(theirs: RendezvousTransport, ours: RendezvousTransport, choice: str = NAME) -> Any:
    """`async with joined(at_the_receiver, at_the_sender, choice) as pair`."""
    known = (theirs, *HOST)
    names = tuple(transport.name for transport in known) if choice == "auto" else (choice,)
    return ends(
        *(SharedPool(), SharedPool(), choice, names),
        sender={"known": (ours, *HOST)},
        receiver={"known": known},
    )


@pytest.mark.parametrize("choice", [NAME, "auto"])
async def test_blocks_travel_by_it_and_are_verified_by_its_digest(
    wires: Wires, recorder: Recorder, choice: str
) -> None:
    transport = RendezvousTransport(wires)
    async with joined(transport, transport, choice) as pair:
        report = await pair.hand_over(recorder)
        assert (report.transport, report.num_blocks, wires.num_blocks) == (NAME, 3, 3)


@pytest.mark.parametrize("verify", [(SUM,), (XXH3, SUM)])
async def test_what_the_wire_spoiled_fails_by_either_digest(
    wires: Wires, recorder: Recorder, verify: tuple[str, ...]
) -> None:
    transport = RendezvousTransport(wires, verify)
    async with joined(transport, transport) as pair:
        pair.source.blocks.fill_(7)
        wires.spoil = True
        with pytest.raises(ChecksumMismatch):
            await pair.hand_over(recorder)
        assert recorder.calls == FAILED


async def test_payload_of_a_hand_off_that_was_withdrawn_meets_its_receive_and_goes_nowhere(wires: Wires) -> None:
    transport = RendezvousTransport(wires)
    async with joined(transport, transport) as pair:
        first = Recorder()
        before = pair.target.blocks.clone()
        offer = pair.offer(first, (8,))
        handoff = await pair.open(offer)
        pushing = asyncio.ensure_future(handoff.push(0, (9,)))
        pair.receiver.withdraw(offer.transfer_id)
        await asyncio.gather(pushing, return_exceptions=True)
        assert first.calls == FAILED
        await pair.hand_over(Recorder())
        assert torch.equal(pair.target.blocks[8], before[8])


@pytest.mark.parametrize(
    ("theirs", "ours", "used"),
    [((XXH3, SUM), (SUM, XXH3), SUM), ((XXH3, SUM), (XXH3, SUM), XXH3), ((XXH3,), (SUM, XXH3), XXH3)],
)
async def test_the_senders_best_digest_that_the_receiver_can_do_is_agreed_on(
    wires: Wires,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    theirs: tuple[str, ...],
    ours: tuple[str, ...],
    used: str,
) -> None:
    agreed: list[str] = []
    for lane in (RendezvousSendingLane, RendezvousReceivingLane):

        def attach(self: Any, hello: Hello, verify: str, _attach: Any = lane.attach) -> None:
            agreed.append(verify)
            _attach(self, hello, verify)

        monkeypatch.setattr(lane, "attach", attach)
    async with joined(RendezvousTransport(wires, theirs), RendezvousTransport(wires, ours)) as pair:
        await pair.hand_over(recorder)
    assert agreed == [used, used]


async def test_sides_without_a_common_digest_refuse_each_other_by_the_fields_name(
    wires: Wires, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = RendezvousTransport(wires, (XXH3,)), RendezvousTransport(wires, (SUM, "crc"))
    async with joined(theirs, ours) as pair:
        with pytest.raises(HandshakeMismatch, match="verify differs: ours sum-64,crc, theirs xxh3-64"):
            await pair.begin(recorder)
        assert "verify differs: ours xxh3-64, theirs sum-64,crc" in logged(caplog)
        assert recorder.calls == []


async def test_auto_passes_over_what_cannot_reach_the_peer(wires: Wires, recorder: Recorder) -> None:
    theirs, ours = RendezvousTransport(wires), RendezvousTransport(wires, why_not="no peer access")
    async with joined(theirs, ours, "auto") as pair:
        assert (await pair.hand_over(recorder)).transport == "shm"


async def test_auto_says_why_nothing_reaches_the_peer(wires: Wires, recorder: Recorder) -> None:
    theirs, ours = RendezvousTransport(wires), RendezvousTransport(wires, why_not="no peer access")
    here, there = {"known": (ours, *TRANSPORTS)}, {"known": (theirs,)}
    async with ends(SharedPool(), SharedPool(), "auto", (NAME,), sender=here, receiver=there) as pair:
        with pytest.raises(TransferError, match=r"the peer offers rendezvous\. rendezvous: no peer access"):
            await pair.begin(recorder)
