"""Hand-offs between two GPUs by NCCL, over stand-ins for it and the driver: order, ends, aborts, room, what is left."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support.ports import free_ports
from kvtransfer.base import BlockRef
from kvtransfer.endpoint import Endpoint
from kvtransfer.nccl_communicator import Limits
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.transports import tcp
from tandem.errors import ChecksumMismatch, PeerLost, TransferError
from tandem.types import BlockId
from tests.manual_clock import ManualClock
from tests.standins.cuda import DevicePool
from tests.standins.nccl import QUICK, StandInNccl, standin_nccl

PATIENCE_S = 20.0
NUM_BLOCKS, BLOCK_BYTES = 16, 256


@pytest.fixture(scope="module")
def stand_in() -> StandInNccl:
    return standin_nccl()


@pytest.fixture
def nccl(stand_in: StandInNccl) -> Iterator[StandInNccl]:
    """With its first settings; nothing may be left alive at the end."""
    stand_in.reset()
    stand_in.cuda.reset()
    before = baseline(stand_in)
    yield stand_in
    stand_in.reset()
    deadline = threading.Event()
    for _ in range(2000):
        if baseline(stand_in) == before:
            break
        deadline.wait(0.01)  # lanes free what is theirs on threads of their own
    assert baseline(stand_in) == before


def baseline(nccl: StandInNccl) -> tuple[Any, ...]:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kv-nccl")]
    # NCCL keeps what waited for a peer that never came: unique ids are counted where both sides met.
    live = {kind: count for kind, count in nccl.live().items() if kind != "ids"}
    return live, nccl.cuda.live(), len(threads)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - nobody is told of what another thread does
            await asyncio.sleep(0.002)


class Side:
    """A worker's pool and its transport."""

    def __init__(self, nccl: StandInNccl, limits: Limits = QUICK) -> None:
        self.pool = DevicePool(NUM_BLOCKS, BLOCK_BYTES)
        self.known = (nccl.transport(limits), tcp.TcpTransport())


class Joined:
    """Senders and receivers of one test, each a process as far as limits go."""

    def __init__(self, nccl: StandInNccl, prints: Any, timing: Any) -> None:
        self._nccl = nccl
        self._prints = prints
        self._timing = timing
        self._sides: list[Side] = []
        self._ends: list[KvSender | KvReceiver] = []

    def sender(self, limits: Limits = QUICK, choice: str = "nccl") -> tuple[KvSender, Side]:
        side = self._side(limits)
        clock = ManualClock()
        sender = KvSender(side.pool.memory, self._prints, clock, choice, timing=self._timing, known=side.known)
        self._ends.insert(0, sender)
        return sender, side

    async def receiver(self, limits: Limits = QUICK, names: tuple[str, ...] = ("nccl",)) -> tuple[KvReceiver, Side]:
        side = self._side(limits)
        clock = ManualClock()
        receiver = KvReceiver(
            side.pool.memory, self._prints, clock, names, "127.0.0.1", timing=self._timing, known=side.known
        )
        await receiver.start()
        self._ends.append(receiver)
        return receiver, side

    def _side(self, limits: Limits) -> Side:
        self._sides.append(Side(self._nccl, limits))
        return self._sides[-1]

    async def stop(self) -> None:
        for end in self._ends:
            if isinstance(end, KvReceiver):
                end.check_invariants()
            await end.stop()
        for side in self._sides:
            side.pool.close()


@pytest.fixture
def joined(nccl: StandInNccl, prints: Any, quick: Any) -> Callable[[], Any]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Joined]:
        ends = Joined(nccl, prints, quick)
        try:
            yield ends
        finally:
            await ends.stop()

    return opened


def offer(receiver: KvReceiver, listener: Any, targets: tuple[int, ...] = (3, 1, 2)) -> Any:
    return receiver.offer(tuple(BlockRef(BlockId(i), 1) for i in targets), listener, 30.0)


async def begin(receiver: KvReceiver, sender: KvSender, listener: Any, targets: tuple[int, ...] = (3, 1, 2)) -> Any:
    offered = offer(receiver, listener, targets)
    return await sender.open(offered.ticket, offered.endpoint, 10.0)


async def hand_over(
    receiver: KvReceiver,
    sender: KvSender,
    listener: Any,
    sources: tuple[int, ...] = (9, 4, 5),
    targets: tuple[int, ...] = (3, 1, 2),
) -> Any:
    handoff = await begin(receiver, sender, listener, targets)
    for i, source in enumerate(sources):
        await handoff.push(i, (source,))
    return await handoff.commit(b"first")


async def push_and_commit(handoff: Any) -> None:
    await handoff.push(0, (9, 4, 5))
    await handoff.commit(b"")


def landed(source: Side, target: Side, sources: tuple[int, ...], targets: tuple[int, ...]) -> bool:
    return torch.equal(source.pool.blocks[list(sources)], target.pool.blocks[list(targets)])


async def test_blocks_go_past_host_memory(joined: Any, recorder: Any) -> None:
    async with joined() as ends:
        (receiver, target), (sender, source) = await ends.receiver(), ends.sender()
        report = await hand_over(receiver, sender, recorder)
        assert (report.transport, report.num_blocks, recorder.payload) == ("nccl", 3, b"first")
        assert landed(source, target, (9, 4, 5), (3, 1, 2))
        assert not source.pool.memory.blocks.any()
        assert not target.pool.memory.blocks.any()


async def test_many_hand_offs_on_one_connection_keep_their_order(
    joined: Any, make_recorder: Any, nccl: StandInNccl
) -> None:
    async with joined() as ends:
        (receiver, target), (sender, source) = await ends.receiver(), ends.sender()
        before = nccl.live()["ids"]  # of peers that died in other tests
        await hand_over(receiver, sender, make_recorder())
        nccl.set("DELAY_US", 1000)
        targets = random.Random(7).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        parts = [tuple(targets[i : i + 2]) for i in range(0, NUM_BLOCKS, 2)]
        pushing = [hand_over(receiver, sender, make_recorder(), (i, 15 - i), part) for i, part in enumerate(parts)]
        await asyncio.gather(*pushing)
        assert all(landed(source, target, (i, 15 - i), part) for i, part in enumerate(parts))
        assert nccl.live()["communicators"] == 2
        assert nccl.live()["ids"] == before


async def test_two_workers_that_send_to_each_other_do_not_wait_for_each_other(
    joined: Any, make_recorder: Any, nccl: StandInNccl
) -> None:
    async with joined() as ends:
        nccl.set("DELAY_US", 1000)
        (there, there_pool), (ours, ours_pool) = await ends.receiver(), ends.sender()
        (back, back_pool), (theirs, theirs_pool) = await ends.receiver(), ends.sender()
        work = [hand_over(there, ours, make_recorder(), (i,), (i,)) for i in range(8)]
        work += [hand_over(back, theirs, make_recorder(), (i,), (i,)) for i in range(8)]
        await asyncio.gather(*work)
        assert torch.equal(ours_pool.pool.blocks[:8], there_pool.pool.blocks[:8])
        assert torch.equal(theirs_pool.pool.blocks[:8], back_pool.pool.blocks[:8])


async def test_a_withdrawn_offer_leaves_the_connection_to_the_others(
    joined: Any, make_recorder: Any, nccl: StandInNccl, tmp_path: Path
) -> None:
    async with joined() as ends:
        (receiver, target), (sender, source) = await ends.receiver(), ends.sender()
        (hold := tmp_path / "hold").touch()
        nccl.set("HOLD", hold)
        gone, other = make_recorder(), make_recorder()
        offered = offer(receiver, gone, (3, 1))
        handoff = await sender.open(offered.ticket, offered.endpoint, 10.0)
        pushes = [asyncio.ensure_future(handoff.push(0, (9,))), asyncio.ensure_future(handoff.push(1, (4,)))]
        await until(lambda: target.pool.blocks[3, 0] == source.pool.blocks[9, 0] and nccl.live()["moves"] == 2)
        before = target.pool.blocks[1].clone()
        receiver.withdraw(offered.transfer_id)
        assert gone.calls == ["receiving", "failed"]  # a receive into block 3 still runs
        hold.unlink()
        await gone.until("writer_stopped")
        await asyncio.gather(*pushes, return_exceptions=True)
        await hand_over(receiver, sender, other, (5,), (2,))
        assert landed(source, target, (5,), (2,))
        assert torch.equal(target.pool.blocks[1], before)  # its WRITE went to scrap
        assert nccl.live()["communicators"] == 2


async def test_bytes_that_change_on_the_way_fail_the_hand_off(joined: Any, recorder: Any, nccl: StandInNccl) -> None:
    async with joined() as ends:
        (receiver, _), (sender, _) = await ends.receiver(), ends.sender()
        nccl.set("SPOIL", 1)
        with pytest.raises(ChecksumMismatch):
            await hand_over(receiver, sender, recorder)
        await recorder.until("writer_stopped")
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]


async def test_a_communicator_that_fails_ends_its_connection_and_the_next_hand_off_has_a_new_one(
    joined: Any, make_recorder: Any, nccl: StandInNccl
) -> None:
    async with joined() as ends:
        (receiver, target), (sender, source) = await ends.receiver(), ends.sender()
        lost = make_recorder()
        handoff = await begin(receiver, sender, lost)
        nccl.set("FAIL", "async:1:6")
        with pytest.raises(TransferError):
            await push_and_commit(handoff)
        await lost.until("writer_stopped")
        nccl.set("FAIL", "")
        await hand_over(receiver, sender, make_recorder())
        assert landed(source, target, (9, 4, 5), (3, 1, 2))


async def test_a_receive_that_does_not_end_is_aborted_in_time(
    joined: Any, make_recorder: Any, nccl: StandInNccl, tmp_path: Path
) -> None:
    async with joined() as ends:
        hasty = replace(QUICK, move_s=0.2)
        (receiver, target), (sender, source) = await ends.receiver(hasty), ends.sender()
        (hold := tmp_path / "hold").touch()
        nccl.set("HOLD", hold)
        lost = make_recorder()
        handoff = await begin(receiver, sender, lost)
        with pytest.raises(TransferError):
            await push_and_commit(handoff)
        await lost.until("writer_stopped")
        assert isinstance(lost.error, PeerLost)
        assert "took longer than 0.2 s" in str(lost.error)
        half = target.pool.blocks.clone()
        hold.unlink()
        await until(lambda: nccl.live()["moves"] == 0)
        assert torch.equal(target.pool.blocks, half)  # nothing came after `writer_stopped`
        await hand_over(receiver, sender, make_recorder())
        assert landed(source, target, (9, 4, 5), (3, 1, 2))


async def test_a_stopped_receiver_ends_its_receives_first(
    joined: Any, recorder: Any, nccl: StandInNccl, tmp_path: Path
) -> None:
    async with joined() as ends:
        (receiver, target), (sender, source) = await ends.receiver(), ends.sender()
        (hold := tmp_path / "hold").touch()
        nccl.set("HOLD", hold)
        handoff = await begin(receiver, sender, recorder)
        pushing = asyncio.ensure_future(handoff.push(0, (9,)))
        await until(lambda: target.pool.blocks[3, 0] == source.pool.blocks[9, 0] and nccl.live()["moves"])
        await receiver.stop()
        assert recorder.calls == ["receiving", "failed", "writer_stopped"]
        await asyncio.wait({pushing})
        await until(lambda: nccl.live()["moves"] == 0)


@pytest.mark.parametrize("call", ["ncclGetUniqueId:1:2", "ncclCommInitRankConfig:1:2", "ncclCommInitRankConfig:2:2"])
async def test_auto_goes_on_to_the_next_transport_where_the_two_cannot_meet(
    joined: Any, recorder: Any, nccl: StandInNccl, call: str
) -> None:
    async with joined() as ends:
        (receiver, _), (sender, _) = await ends.receiver(names=("nccl", "tcp")), ends.sender(choice="auto")
        nccl.set("FAIL", call)
        handoff = await begin(receiver, sender, recorder)
        await handoff.push(0, (9, 4, 5))
        assert (await handoff.commit(b"")).transport == "tcp"


async def test_a_peer_that_does_not_come_to_the_meeting_is_given_up(
    joined: Any, recorder: Any, nccl: StandInNccl
) -> None:
    async with joined() as ends:
        hasty = replace(QUICK, begin_s=0.2)
        (receiver, _), (sender, _) = await ends.receiver(), ends.sender(hasty)
        nccl.set("HANG", "init")
        with pytest.raises(PeerLost, match="to meet the peer took longer"):
            await begin(receiver, sender, recorder)
        assert recorder.calls == []


async def test_where_nobody_listens_no_communicator_is_named(joined: Any, recorder: Any, nccl: StandInNccl) -> None:
    async with joined() as ends:
        receiver, _ = await ends.receiver()
        sender, _ = ends.sender()
        offered, before = offer(receiver, recorder), nccl.live()["ids"]
        (port,) = free_ports(1)
        known = Endpoint.decode(offered.endpoint)
        nowhere = Endpoint(known.incarnation, {"nccl": {**known.reach["nccl"], "port": str(port)}})
        with pytest.raises(PeerLost):
            await sender.open(offered.ticket, nowhere.encode(), 10.0)
        assert nccl.live()["ids"] == before  # the library would keep it for good


async def test_an_idle_connection_makes_room_on_the_senders_side(joined: Any, make_recorder: Any, nccl: Any) -> None:
    async with joined() as ends:
        sender, source = ends.sender(replace(QUICK, communicators=2))
        receivers = [await ends.receiver() for _ in range(3)]
        for receiver, target in [*receivers, receivers[0]]:
            await hand_over(receiver, sender, make_recorder())
            assert landed(source, target, (9, 4, 5), (3, 1, 2))
        await until(lambda: nccl.live()["communicators"] == 4)


async def test_an_idle_connection_makes_room_on_the_receivers_side(joined: Any, make_recorder: Any, nccl: Any) -> None:
    async with joined() as ends:
        receiver, target = await ends.receiver(replace(QUICK, communicators=2))
        senders = [ends.sender() for _ in range(3)]
        for sender, source in [*senders, senders[0]]:
            await hand_over(receiver, sender, make_recorder())
            assert landed(source, target, (9, 4, 5), (3, 1, 2))
        await until(lambda: nccl.live()["communicators"] == 4)


async def test_no_connection_with_an_open_hand_off_makes_room(joined: Any, make_recorder: Any, nccl: Any) -> None:
    async with joined() as ends:
        sender, source = ends.sender(replace(QUICK, communicators=1))
        (first, target), (second, _) = await ends.receiver(), await ends.receiver()
        handoff = await begin(first, sender, make_recorder())
        with pytest.raises(TransferError, match="room for 1 communicators, and none is idle"):
            await begin(second, sender, make_recorder())
        await handoff.push(0, (9, 4, 5))
        await handoff.commit(b"")
        assert landed(source, target, (9, 4, 5), (3, 1, 2))
        await hand_over(second, sender, make_recorder(), targets=(6, 7, 8))


async def test_an_abort_that_does_not_return_ends_the_process(
    nccl: StandInNccl, prints: Any, quick: Any, recorder: Any
) -> None:
    stopped = threading.Event()

    def stop() -> None:  # where a process would end
        stopped.set()
        nccl.set("HANG", "")

    limits = replace(QUICK, abort_s=0.1)
    source, target = (DevicePool(NUM_BLOCKS, BLOCK_BYTES) for _ in range(2))
    ours, theirs = nccl.transport(limits, stop), nccl.transport()
    receiver = KvReceiver(target.memory, prints, ManualClock(), ("nccl",), "127.0.0.1", timing=quick, known=(theirs,))
    sender = KvSender(source.memory, prints, ManualClock(), "nccl", timing=quick, known=(ours,))
    await receiver.start()
    await hand_over(receiver, sender, recorder)
    nccl.set("HANG", "abort")
    await sender.stop()
    await until(stopped.is_set)
    await receiver.stop()
    source.close()
    target.close()
