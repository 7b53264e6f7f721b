"""Peers that say what nobody should, to both sides of a hand-off: `python -m tests.fuzz.transfer --minutes 10`.

    decoders    bytes near a frame, a payload, a ticket, an endpoint, a handshake
    opens       a sender is given a ticket and an endpoint near true ones
    receiver    a receiver hears a sender: HELLO, OPEN, WRITE, COMMIT, … near true ones, in any order
    sender      a sender hears a receiver: HELLO, OPEN_OK, WITHDRAWN, … near true ones, in any order

Over each transport that works for pools in host memory, or the one named: cuda_ipc then has its pools on the first GPU.
`PYTHONPATH=tests/standins/site:.` adds cuda_ipc and nccl over the stand-ins for their libraries.

Whatever comes may end in a TransferError or well, within the case's time. All else is a violation, told with the case
that `--seed S --only-case N` draws again: another exception, a log line of a bug of our own, a hang, an offer without
an end, memory or descriptors that grow. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
import secrets
import sys
import threading
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvloop

from bench.support.processes import usage
from kvtransfer.base import Offer, PoolMemory
from kvtransfer.connection import Connection
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.messages import Commit, Write, digest_of, encode_error, encode_window
from kvtransfer.pool import Pool
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.ticket import Ticket
from kvtransfer.timing import Timing
from kvtransfer.transport import ListenOptions, ReceivingLane, SendingLane
from kvtransfer.transports import named, usable
from shell.clock import Clock, MonotonicClock
from tandem.errors import PeerLost, TransferError
from tandem.types import BlockId
from tests.fuzz.near_bytes import DECODERS, near, near_decoder, near_fields, near_frame
from tests.fuzz.pools import NUM_BLOCKS, PRINTS, MakeMemory, memory_for
from tests.kv_ends import refs_of

TIMING = Timing(lease_s=0.5, reply_s=0.5, stop_s=0.05)
CASE_S = 30.0
"""A case that takes longer hangs."""
CHECK_EVERY = 200
"""Cases after which everything must be at rest, and a true hand-off go through."""
MORE_RSS_BYTES = 64 * 1024 * 1024
MORE_DESCRIPTORS = 8
LOOPBACK = "127.0.0.1"


class _Listener:
    """Knows how far its offer has ended."""

    def __init__(self, blocks: tuple[BlockId, ...]) -> None:
        self.blocks = blocks
        self.told = False
        """Whether the owner knows the end."""
        self.ended = False
        """Whether its blocks are the owner's again. Never, if they may still be written by a peer that left without a
        word: hostile peers are of this process, which lives."""

    def on_receiving(self) -> None: ...

    def on_committed(self, first_token_payload: bytes) -> None:
        self.told = self.ended = True

    def on_failed(self, error: TransferError) -> None:
        self.told = True

    def on_writer_stopped(self) -> None:
        self.ended = True


class _Bugs(logging.Handler):
    """Keeps what was logged as an error: a bug of our own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class World:
    """Both sides over one transport, and hostile peers for either. One per event loop."""

    def __init__(self, transport: str, target: PoolMemory, source: PoolMemory) -> None:
        (self._transport,) = named((transport,))
        clock = MonotonicClock()
        self._receiver = KvReceiver(target, PRINTS, clock, (transport,), LOOPBACK, timing=TIMING)
        self._sender = KvSender(source, PRINTS, clock, transport, timing=TIMING)
        self._hostile: Pool = Pool(source, PRINTS)
        self._listeners: list[_Listener] = []
        self.outcomes: Counter[str] = Counter()

    async def start(self) -> None:
        """See `KvReceiver.start`."""
        await self._receiver.start()

    async def stop(self) -> None:
        """Ends both sides."""
        await self._sender.stop()
        await self._receiver.stop()
        self._hostile.close()

    async def case(self, rng: random.Random) -> None:
        """One hostile peer. Raises whatever is no TransferError."""
        what = rng.choice((self.decoders, self.decoders, self.opens, self.receiver_hears, self.sender_hears))
        try:
            async with asyncio.timeout(CASE_S):
                await what(rng)
            outcome = "went well"
        except TransferError as error:
            outcome = type(error).__name__
        self.outcomes[f"{what.__name__}: {outcome}"] += 1

    async def check(self) -> None:
        """A true hand-off goes through. Raises what it finds wrong."""
        async with asyncio.timeout(CASE_S):
            while not await self._hands_over():
                pass
        self._receiver.check_invariants()

    async def _hands_over(self) -> bool:
        """False if a peer was lost: where others compute, to begin may take longer than a lease as short as here."""
        with self._offered() as (offer, listener):
            try:
                handoff = await self._sender.open(offer.ticket, offer.endpoint, CASE_S)
                await handoff.push(0, (BlockId(4), BlockId(5)))
                await handoff.commit(b"")
            except PeerLost:
                return False
            if not listener.ended:
                raise AssertionError("a true hand-off did not commit")
            return True

    @property
    def is_worn(self) -> bool:
        """Whether too many blocks are in quarantine for ever."""
        return len(self._free()) < 4

    async def decoders(self, rng: random.Random) -> None:
        """Bytes are read or refused."""
        name = rng.choice(tuple(DECODERS))
        DECODERS[name][0](near_decoder(rng, name))

    async def opens(self, rng: random.Random) -> None:
        """What a router might bring."""
        with self._offered() as (offer, _):
            ticket = near(rng, offer.ticket) if rng.random() < 0.5 else offer.ticket
            endpoint = near_fields(rng, offer.endpoint)
            handoff = await self._sender.open(ticket, endpoint, 2 * TIMING.lease_s)
            await handoff.abort()

    async def receiver_hears(self, rng: random.Random) -> None:
        """From a sender that speaks by hand."""
        with self._offered() as (offer, _):
            fields = Endpoint.decode(offer.endpoint).reach[self._transport.name]
            sock, lane = await self._transport.dial(self._hostile, fields, None)
            connection = Connection(sock, TIMING)
            try:
                await lane.secure(connection)
                hello = Frame(FrameType.HELLO, payload=lane.hello().encode())
                true_hello = rng.random() < 0.8
                await self._say(connection, hello.encode() if true_hello else near_frame(rng, hello))
                await self._hear_hello(lane, connection, must_come=true_hello)
                for frame in _sender_says(rng, offer):
                    await self._say(connection, near_frame(rng, frame) if rng.random() < 0.4 else frame.encode())
                    if frame.type is FrameType.WRITE and rng.random() < 0.9:
                        await self._say(connection, rng.randbytes(2 * PRINTS.layout.block_bytes))
                if rng.random() < 0.9:  # else it leaves without a word, and this process never dies
                    await self._say(connection, Frame(FrameType.DRAINED, int(offer.transfer_id, 16)).encode())
                    await self._say(connection, Frame(FrameType.BYE).encode())
            finally:
                lane.close()
                await connection.close()
                await lane.closed()

    async def _hear_hello(self, lane: SendingLane, connection: Connection, *, must_come: bool) -> None:
        """Raises TransferError if it must come and does not."""
        try:
            async with asyncio.timeout(CASE_S if must_come else TIMING.lease_s):
                await lane.receive_hello(connection)
        except (TransferError, TimeoutError):
            if must_come:
                raise

    async def sender_hears(self, rng: random.Random) -> None:
        """From a receiver that speaks by hand."""
        ticket = Ticket(
            *(rng.randrange(1, 2**63), self._hostile.incarnation, bytes(16), PRINTS.layout.fingerprint(), 9000, 0),
            refs_of((3, 1)),
        )
        async with self._hostile_receiver(rng, ticket.number) as endpoint:
            handoff = await self._sender.open(ticket.encode(), endpoint, 2 * TIMING.lease_s)
            try:
                await handoff.push(0, (BlockId(0), BlockId(1)))
                await handoff.commit(b"")
            finally:
                await handoff.abort()

    @asynccontextmanager
    async def _hostile_receiver(self, rng: random.Random, number: int) -> AsyncIterator[bytes]:
        """Its endpoint. It serves one connection."""
        acceptor = self._transport.listen(self._hostile, ListenOptions(LOOPBACK, 0, LOOPBACK, None))

        async def serve() -> None:
            sock, _ = await asyncio.get_running_loop().sock_accept(acceptor.sock)
            connection = Connection(sock, TIMING)
            with contextlib.suppress(TransferError, OSError):
                try:
                    await self._answer(rng, connection, acceptor.accept(sock), number)
                finally:
                    await connection.close()

        serving = asyncio.create_task(serve())
        try:
            yield Endpoint(self._hostile.incarnation, {self._transport.name: acceptor.fields}).encode()
        finally:
            serving.cancel()
            await asyncio.wait({serving})
            acceptor.sock.close()
            if not serving.cancelled():
                serving.result()

    async def _answer(self, rng: random.Random, connection: Connection, lane: ReceivingLane, number: int) -> None:
        try:
            await connection.receive()
            hello = Frame(FrameType.HELLO, payload=lane.hello().encode())
            if rng.random() < 0.5:
                hello = Frame(FrameType.HELLO, payload=near_fields(rng, hello.payload))
            if rng.random() < 0.9:
                lane.send_hello(connection, hello)
                connection.start()
            else:
                await self._say(connection, near_frame(rng, hello))
            for frame in _receiver_says(rng, number):
                await self._say(connection, near_frame(rng, frame) if rng.random() < 0.4 else frame.encode())
        finally:
            lane.close()
            await lane.closed()

    @contextmanager
    def _offered(self) -> Iterator[tuple[Offer, _Listener]]:
        """A true offer; withdrawn in the end."""
        listener = _Listener(self._free()[:2])
        self._listeners = [each for each in self._listeners if not each.ended] + [listener]
        offer = self._receiver.offer(refs_of(listener.blocks), listener, 60.0)
        try:
            yield offer, listener
        finally:
            self._receiver.withdraw(offer.transfer_id)
            if not listener.told:
                raise AssertionError("an offer that was withdrawn has no end")

    def _free(self) -> tuple[BlockId, ...]:
        lent = {block for listener in self._listeners if not listener.ended for block in listener.blocks}
        return tuple(BlockId(i) for i in range(NUM_BLOCKS) if i not in lent)

    async def _say(self, connection: Connection, data: bytes) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # it has hung up, as it may
            async with asyncio.timeout(TIMING.lease_s):
                await asyncio.get_running_loop().sock_sendall(connection.sock, data)


def _sender_says(rng: random.Random, offer: Offer) -> list[Frame]:
    number = int(offer.transfer_id, 16)
    sums = (rng.randrange(2**64), rng.randrange(2**64))
    frames = [
        Frame(FrameType.OPEN, number, payload=offer.ticket),
        Frame(FrameType.WRITE, number, payload=Write(0, sums).encode()),
        Frame(FrameType.COMMIT, number, payload=Commit(1, digest_of(sums), b"").encode()),
    ]
    return _shuffled(rng, frames, (FrameType.ABORT, FrameType.DRAINED, FrameType.HEARTBEAT, FrameType.BYE), number)


def _receiver_says(rng: random.Random, number: int) -> list[Frame]:
    lost = encode_error(PeerLost("gone"))
    frames = [
        Frame(FrameType.OPEN_OK, number, payload=encode_window(rng.choice((1, 16, 2**32 - 1)))),
        Frame(FrameType.WRITE_OK, number),
        Frame(rng.choice((FrameType.FAILED, FrameType.WITHDRAWN, FrameType.REFUSED)), number, payload=lost),
        Frame(FrameType.COMMITTED, number),
    ]
    return _shuffled(rng, frames, (FrameType.DRAINED, FrameType.HEARTBEAT, FrameType.BYE), number)


def _shuffled(rng: random.Random, frames: list[Frame], others: tuple[FrameType, ...], number: int) -> list[Frame]:
    """Some of them, mostly in order, with others between."""
    chosen = [frame for frame in frames if rng.random() < 0.85]
    if rng.random() < 0.3:
        rng.shuffle(chosen)
    for _ in range(rng.choice((0, 0, 1, 3))):
        chosen.insert(rng.randrange(len(chosen) + 1), Frame(rng.choice(others), number))
    return chosen


async def fuzz(
    transport: str, seed: int, cases: Iterable[int], make_memory: MakeMemory
) -> tuple[Counter[str], list[str]]:
    """How often cases ended how, and what was violated, at most one thing: what follows it would tell no more."""
    bugs, outcomes = _Bugs(), Counter[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.lines.append(str(context)))
    logger = logging.getLogger("kvtransfer")
    logger.addHandler(bugs)
    number, remaining = -1, iter(cases)
    try:
        while not bugs.lines:
            with make_memory() as target, make_memory() as source:
                world = World(transport, target, source)
                await world.start()
                try:
                    for number in itertools.islice(remaining, CHECK_EVERY):
                        await world.case(random.Random(f"{seed}/{number}"))
                        if bugs.lines or world.is_worn:
                            break
                    else:
                        if number < 0 or not world.outcomes:
                            return outcomes, []
                    await world.check()
                finally:
                    outcomes += world.outcomes
                    await world.stop()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was looked for
        bugs.lines.append("".join(traceback.format_exception(error)))
    finally:
        logger.removeHandler(bugs)
    return outcomes, [f"{transport}, --seed {seed} --only-case {number}: {line}" for line in bugs.lines]


def run(transport: str, seed: int, cases: Iterable[int]) -> list[str]:
    """Fuzzes, prints what came of it. Returns what was violated."""
    before = usage(os.getpid())
    work = fuzz(transport, seed, cases, memory_for(transport))
    outcomes, violations = uvloop.run(work)  # as workers do; asyncio's own accept can break
    for thread in threading.enumerate():
        if thread.name.startswith("kv-"):  # lanes free what is theirs there, and nobody waits for it
            thread.join(CASE_S)
    gc.collect()  # errors hold the frames that they passed through, and those the pools of this process
    after = usage(os.getpid())
    assert before is not None
    assert after is not None
    if after.rss_bytes - before.rss_bytes > MORE_RSS_BYTES or after.descriptors - before.descriptors > MORE_DESCRIPTORS:
        violations.append(f"{transport}, seed {seed}: leak: {before} became {after}")
    print(f"{transport}: {sum(outcomes.values())} cases; {dict(sorted(outcomes.items()))}")
    return violations


def _until(end_s: float, clock: Clock) -> Iterator[int]:
    return itertools.takewhile(lambda _: clock.now_s() < end_s, itertools.count())


def main() -> int:
    """Runs and prints; exit code 1 if anything was violated."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of all transports together")
    parser.add_argument("--transport", default="", help="this one alone")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn; default: another one each time")
    parser.add_argument("--only-case", type=int, default=None, metavar="N", help="this case of the seed alone")
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    logging.basicConfig(level=logging.CRITICAL)
    names = [options.transport] if options.transport else list(usable("cpu"))
    violations = []
    clock = MonotonicClock()
    for name in names:
        end_s = clock.now_s() + 60 * options.minutes / len(names)
        violations += run(name, seed, _until(end_s, clock) if options.only_case is None else [options.only_case])
    print(*violations, sep="\n")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
