"""Hand-offs between two GPUs by NCCL, over stand-ins for it and the driver: order, ends, aborts, room, what is left."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support.ports import free_ports
from kvtransfer.transports import tcp
from tandem.errors import ChecksumMismatch, PeerLost, TransferError
from tests.kv_ends import FAILED, QUICK, Pair, Recorder, ends, logged, push_and_commit, rerouted, until
from tests.standins.cuda import DevicePool
from tests.standins.nccl import StandInNccl, standin_nccl

NUM_BLOCKS, BLOCK_BYTES = 16, 256
NO_LIMITS: Mapping[str, Any] = {}
"""None but those of the stand-in."""


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


@pytest.fixture
def joined(nccl: StandInNccl) -> Callable[..., Any]:
    """`async with joined() as pair`: two processes, as far as limits go."""

    def opened(
        sending: Mapping[str, Any] = NO_LIMITS, receiving: Mapping[str, Any] = NO_LIMITS, choice: str = "nccl"
    ) -> Any:
        here, there = ((nccl.transport(**limits), tcp.TcpTransport()) for limits in (sending, receiving))
        pools = (DevicePool(NUM_BLOCKS, BLOCK_BYTES) for _ in range(2))
        names = ("nccl",) if choice == "nccl" else ("nccl", "tcp")
        return ends(*pools, choice, names, QUICK, sender={"known": here}, receiver={"known": there})

    return opened


@pytest.fixture
def hold(nccl: StandInNccl, tmp_path: Path) -> Any:
    """While this file is there, moves stop half-way."""
    (path := tmp_path / "hold").touch()
    nccl.set("HOLD", path)
    return path


async def test_many_hand_offs_on_one_connection_keep_their_order(joined: Any, nccl: StandInNccl) -> None:
    async with joined() as pair:
        before = nccl.live()["ids"]  # of peers that died in other tests
        await pair.hand_over(Recorder())
        nccl.set("DELAY_US", 1000)
        targets = random.Random(7).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        parts = [tuple(targets[i : i + 2]) for i in range(0, NUM_BLOCKS, 2)]
        await asyncio.gather(*(pair.hand_over(Recorder(), part, (i, 15 - i)) for i, part in enumerate(parts)))
        assert nccl.live()["communicators"] == 2
        assert nccl.live()["ids"] == before


async def test_two_workers_that_send_to_each_other_do_not_wait_for_each_other(joined: Any, nccl: StandInNccl) -> None:
    async with joined() as there, joined() as back:
        nccl.set("DELAY_US", 1000)
        work = [pair.hand_over(Recorder(), (i,), (i,)) for pair in (there, back) for i in range(8)]
        await asyncio.gather(*work)


async def test_a_withdrawn_offer_leaves_the_connection_to_the_others(joined: Any, nccl: StandInNccl, hold: Any) -> None:
    async with joined() as pair:
        gone = Recorder()
        offer = pair.offer(gone, (3, 1))
        handoff = await pair.open(offer)
        pushes = [asyncio.ensure_future(handoff.push(0, (9,))), asyncio.ensure_future(handoff.push(1, (4,)))]
        await until(lambda: pair.target.blocks[3, 0] == pair.source.blocks[9, 0] and nccl.live()["moves"] == 2)
        before = pair.target.blocks[1].clone()
        pair.receiver.withdraw(offer.transfer_id)
        assert gone.calls == FAILED[:2]  # a receive into block 3 still runs
        hold.unlink()
        await gone.until("writer_stopped")
        await asyncio.gather(*pushes, return_exceptions=True)
        await pair.hand_over(Recorder(), (2,), (5,))
        assert torch.equal(pair.target.blocks[1], before)  # its WRITE went to scrap
        assert nccl.live()["communicators"] == 2


async def test_bytes_that_change_on_the_way_fail_the_hand_off(
    joined: Any, recorder: Recorder, nccl: StandInNccl
) -> None:
    async with joined() as pair:
        nccl.set("SPOIL", 1)
        with pytest.raises(ChecksumMismatch):
            await pair.hand_over(recorder)
        await recorder.until("writer_stopped")
        assert recorder.calls == FAILED


async def test_a_communicator_that_fails_ends_its_connection_and_the_next_hand_off_has_a_new_one(
    joined: Any, recorder: Recorder, nccl: StandInNccl
) -> None:
    async with joined() as pair:
        handoff = await pair.begin(recorder)
        nccl.set("FAIL", "async:1:6")
        with pytest.raises(TransferError):
            await push_and_commit(handoff)
        await recorder.until("writer_stopped")
        nccl.set("FAIL", "")
        await pair.hand_over(Recorder())


async def test_a_receive_that_does_not_end_is_aborted_in_time(
    joined: Any, recorder: Recorder, nccl: StandInNccl, hold: Any
) -> None:
    async with joined(receiving={"move_s": 0.2}) as pair:
        with pytest.raises(TransferError):
            await pair.hand_over(recorder)
        await recorder.until("writer_stopped")
        assert isinstance(recorder.error, PeerLost)
        assert "took longer than 0.2 s" in str(recorder.error)
        half = pair.target.blocks.clone()
        hold.unlink()
        await until(lambda: nccl.live()["moves"] == 0)
        assert torch.equal(pair.target.blocks, half)  # nothing came after `writer_stopped`
        await pair.hand_over(Recorder())


async def test_a_stopped_receiver_ends_its_receives_first(
    joined: Any, recorder: Recorder, nccl: StandInNccl, hold: Any
) -> None:
    async with joined() as pair:
        handoff = await pair.begin(recorder)
        pushing = asyncio.ensure_future(handoff.push(0, (9,)))
        await until(lambda: pair.target.blocks[3, 0] == pair.source.blocks[9, 0] and nccl.live()["moves"])
        await pair.receiver.stop()
        assert recorder.calls == FAILED
        await asyncio.wait({pushing})
        await until(lambda: nccl.live()["moves"] == 0)


@pytest.mark.parametrize("call", ["ncclGetUniqueId:1:2", "ncclCommInitRankConfig:1:2", "ncclCommInitRankConfig:2:2"])
async def test_auto_goes_on_to_the_next_transport_where_the_two_cannot_meet(
    joined: Any, recorder: Recorder, nccl: StandInNccl, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with joined(choice="auto") as pair:
        nccl.set("FAIL", call)
        assert (await push_and_commit(await pair.begin(recorder))).transport == "tcp"
        await until(lambda: not pair.sender._better)
        assert (await push_and_commit(await pair.begin(Recorder(), (6,)), (9,))).transport == "tcp"
    assert "kv transport not reached {'transport': 'nccl', 'cause': " in logged(caplog)


async def test_auto_hands_over_by_another_transport_while_the_two_meet(
    joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(choice="auto") as pair:
        transport, gate = pair.sender._transports[0], asyncio.Event()
        dial = transport.dial

        async def late(*args: Any) -> Any:
            await gate.wait()
            return await dial(*args)

        monkeypatch.setattr(transport, "dial", late)
        first = await pair.begin(Recorder(), (1, 2))
        await first.push(0, (7,))
        gate.set()
        await until(lambda: pair.sender._former)
        later = await pair.hand_over(Recorder(), (3,), (5,))
        assert (later.transport, later.passed_over) == ("nccl", "")
        await first.push(1, (8,))
        report = await first.commit(b"")
        assert (report.transport, report.passed_over) == ("tcp", "nccl: it is being dialled")
        await pair.hand_over(Recorder(), (4,), (6,))
        assert not pair.sender._former, "a link that nobody uses any more stays open"


async def test_where_nccl_is_forced_a_hand_off_waits_as_long_as_a_first_communicator_may_take(
    joined: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined() as pair:
        dial = pair.sender._dial_over

        async def late(*args: Any) -> Any:
            await asyncio.sleep(0.1)
            return await dial(*args)

        monkeypatch.setattr(pair.sender, "_dial_over", late)
        await (await pair.open(pair.offer(recorder), timeout_s=0.01)).abort()


async def test_a_peer_that_does_not_come_to_the_meeting_is_given_up(
    joined: Any, recorder: Recorder, nccl: StandInNccl
) -> None:
    async with joined(sending={"begin_s": 0.2}) as pair:
        nccl.set("HANG", "init")
        with pytest.raises(PeerLost, match="to meet the peer took longer"):
            await pair.begin(recorder)
        assert recorder.calls == []


async def test_where_nobody_listens_no_communicator_is_named(
    joined: Any, recorder: Recorder, nccl: StandInNccl
) -> None:
    async with joined() as pair:
        offer, before = pair.offer(recorder), nccl.live()["ids"]
        (port,) = free_ports(1)
        with pytest.raises(PeerLost):
            await pair.open(rerouted(offer, "nccl", port=str(port)))
        assert nccl.live()["ids"] == before  # the library would keep it for good


def crossed(sending: Pair, receiving: Pair) -> Pair:
    """The sender of one pair with the receiver of another."""
    return Pair(sending.source, receiving.target, receiving.receiver, sending.sender, sending.clock)


@pytest.mark.parametrize("few", ["sending", "receiving"])
async def test_an_idle_connection_makes_room_on_either_side(joined: Any, nccl: StandInNccl, few: str) -> None:
    async with AsyncExitStack() as stack:
        opened = [joined(**{few: {"most": 2}}) for _ in range(3)]
        first, *_ = pairs = [await stack.enter_async_context(each) for each in opened]
        for pair in [*pairs, first]:
            await (crossed(first, pair) if few == "sending" else crossed(pair, first)).hand_over(Recorder())
        await until(lambda: nccl.live()["communicators"] == 4)


async def test_no_connection_with_an_open_hand_off_makes_room(joined: Any) -> None:
    async with joined(sending={"most": 1}) as pair, joined() as other:
        second = crossed(pair, other)
        handoff = await pair.begin(Recorder())
        with pytest.raises(TransferError, match="room for 1 communicators, and none is idle"):
            await second.begin(Recorder())
        await push_and_commit(handoff)
        assert pair.landed()
        await second.hand_over(Recorder(), (6, 7, 8))


async def test_an_abort_that_does_not_return_ends_the_process(
    joined: Any, recorder: Recorder, nccl: StandInNccl
) -> None:
    stopped = threading.Event()

    def stop() -> None:  # where a process would end
        stopped.set()
        nccl.set("HANG", "")

    async with joined(sending={"abort_s": 0.1, "end_process": stop}) as pair:
        await pair.hand_over(recorder)
        nccl.set("HANG", "abort")
        await pair.sender.stop()
        await until(stopped.is_set)
