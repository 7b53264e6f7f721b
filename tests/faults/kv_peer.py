"""One side of a hand-off as a process of its own, forked from a server that has loaded everything: started in
milliseconds, so that each cell of the fault matrix has its own.

A peer does its part of one hand-off and stands still, as a whole, at the one point that it was told, until it is told
to go on or gets a signal. What it says over its pipe are tuples, the first item of each a word.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Any

from kvtransfer import link as link_module
from kvtransfer import receiver as receiver_module
from kvtransfer.handoff import OutgoingHandoff
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session import Session
from kvtransfer.ticket import Ticket
from kvtransfer.timing import Timing
from kvtransfer.wire import readable
from shell.clock import MonotonicClock
from tandem.errors import TransferError
from tandem.types import BlockId
from tests.kv_ends import Recorder, refs_of
from tests.transports import PRINTS, make_pool, transport_of

PATIENCE_S = 60.0
PAYLOAD = b"\x2a"
TARGETS = (BlockId(3), BlockId(1))
"""Blocks that a receiving peer offers."""
FILL = 0xAB
"""Every byte of a sending peer's pool."""
SENDER_POINTS = ("connected", "shown", "placing", "placed", "pushed", "sent", "committing", "committed")
"""Before the ticket is shown; after that; before and after the copy of the first of two blocks; when it was pushed;
when both were; COMMIT has left; COMMITTED has come."""
RECEIVER_POINTS = ("accepted", "shown", "taking", "taken", "verified", "committing", "committed")
"""Before HELLO; the ticket is being shown; before the first block's payload, after it, after its digest; at COMMIT; the
sender was told."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class Stand:
    """In the peer: where it stands still."""

    def __init__(self, pipe: Pipe, point: str) -> None:
        self._pipe = pipe
        self._point = point

    def at(self, point: str) -> None:
        """The whole process, loop included; once."""
        if point == self._point:
            self._point = ""
            self._pipe.send(("at", point))
            self._pipe.recv()


class StandingLane:
    """A lane that stands still around its work; everything else is the lane's own."""

    def __init__(self, lane: Any, stand: Stand) -> None:
        self._lane = lane
        self._stand = stand

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    async def place(self, *args: Any) -> tuple[int, ...]:
        self._stand.at("placing")
        checksums: tuple[int, ...] = await self._lane.place(*args)
        self._stand.at("placed")
        return checksums

    async def receive(self, *args: Any) -> None:
        self._stand.at("taking")
        await self._lane.receive(*args)
        self._stand.at("taken")

    async def checksums(self, *args: Any) -> tuple[int, ...]:
        checksums: tuple[int, ...] = await self._lane.checksums(*args)
        self._stand.at("verified")
        return checksums


async def _send(pipe: Pipe, transport: str, stand: Stand, timing: Timing) -> None:
    """Hears an offer; opens, pushes block after block, commits; says how that ended, then that it has stopped."""
    _patch_link(stand)
    pool = make_pool(transport)
    pool.blocks.fill_(FILL)
    sender = KvSender(pool.memory, PRINTS, MonotonicClock(), transport_of(transport), timing=timing)
    ticket, endpoint = await heard(pipe)
    error = ""
    try:
        handoff = await sender.open(ticket, endpoint, PATIENCE_S)
        stand.at("shown")
        for position in range(len(Ticket.decode(ticket).blocks)):
            await handoff.push(position, (BlockId(position),))
            stand.at("pushed")
        stand.at("sent")
        await _commit(handoff, stand)
        stand.at("committed")
    except TransferError as failure:
        error = str(failure)
    pipe.send(("ended", error))
    await sender.stop()
    pipe.send(("stopped",))
    await heard(pipe)


def _patch_link(stand: Stand) -> None:
    check, made = link_module.Link._check, link_module.OutgoingHandoff

    def checked(self: Any, ticket: Ticket) -> None:
        check(self, ticket)
        stand.at("connected")

    def make(ticket: Ticket, sink: Any, lane: Any, *rest: Any) -> OutgoingHandoff:
        return made(ticket, sink, StandingLane(lane, stand), *rest)

    link_module.Link._check = checked  # type: ignore[method-assign]
    link_module.OutgoingHandoff = make  # type: ignore[assignment,misc]


async def _commit(handoff: Any, stand: Stand) -> None:
    committing = asyncio.ensure_future(handoff.commit(PAYLOAD))
    await asyncio.sleep(0)
    while handoff._connection._outbox:  # noqa: ASYNC110  an outbox tells nobody
        await asyncio.sleep(0)
    stand.at("committing")
    await committing


class _Listener(Recorder):
    """Stands still when the ticket is shown, and at the commit."""

    def __init__(self, stand: Stand) -> None:
        super().__init__()
        self._stand = stand

    def _add(self, call: str) -> None:
        super()._add(call)
        if (point := {"receiving": "shown", "committed": "committing"}.get(call)) is not None:
            self._stand.at(point)


async def _receive(pipe: Pipe, transport: str, stand: Stand, timing: Timing) -> None:
    """Says its offer. Told to stop: what its listener was told, how many offers live, what lies in the blocks."""

    def make(connection: Any, lane: Any, *rest: Any) -> Session:
        stand.at("accepted")
        return Session(connection, StandingLane(lane, stand), *rest)  # type: ignore[arg-type]

    receiver_module.Session = make  # type: ignore[assignment,misc]
    pool = make_pool(transport)
    receiver = KvReceiver(pool.memory, PRINTS, MonotonicClock(), (transport_of(transport),), "127.0.0.1", timing=timing)
    await receiver.start()
    listener = _Listener(stand)
    pipe.send(receiver.offer(refs_of(TARGETS), listener, PATIENCE_S))
    if stand._point == "committed":
        await listener.until("committed")
        await heard(pipe)  # the sender has heard of it
        stand.at("committed")
    await heard(pipe)
    await receiver.stop()
    content = bytes(pool.blocks[list(TARGETS)].flatten().tolist())
    pipe.send(("calls", listener.calls, receiver.num_live, content))


async def heard(pipe: Pipe) -> Any:
    """What the other side says next. Raises EOFError when it has gone, TimeoutError when it says nothing."""
    async with asyncio.timeout(PATIENCE_S):
        await readable(pipe.fileno())
    return pipe.recv()


def _run(pipe: Pipe, role: str, transport: str, point: str, timing: Timing) -> None:
    work = {"send": _send, "receive": _receive}[role]
    asyncio.run(work(pipe, transport, Stand(pipe, point), timing))


def _begin(pipe: Pipe, work: Callable[..., None], args: Sequence[object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which ends its peers
    work(pipe, *args)


class Forked:
    """In the test: another process, which runs `work(pipe, *args)`."""

    def __init__(self, work: Callable[..., None], *args: object) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_begin, args=(theirs, work, args), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, *words: object) -> None:
        self._pipe.send(words)

    async def hear(self) -> Any:
        return await heard(self._pipe)

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    async def ended(self) -> int:
        """The exit code, once there is one; of a signal its number, negative. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            await readable(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


class Peer(Forked):
    """One that stands still at a point."""

    def __init__(self, role: str, transport: str, point: str, timing: Timing) -> None:
        super().__init__(_run, role, transport, point, timing)
        self.point = point

    async def reaches_its_point(self) -> None:
        assert await self.hear() == ("at", self.point)


def _nothing() -> None:
    """Starts the server that peers are forked from."""


def warm_up() -> None:
    """Returns once peers start without delay."""
    process = _CONTEXT.Process(target=_nothing)
    process.start()
    process.join()
    process.close()


@contextmanager
def peers(role: str, transport: str, points: Sequence[str], timing: Timing) -> Iterator[list[Peer]]:
    """One for each point; killed in the end."""
    warm_up()
    started: list[Peer] = []
    try:
        for point in points:
            started.append(Peer(role, transport, point, timing))
        yield started
    finally:
        for peer in started:
            peer.close()
