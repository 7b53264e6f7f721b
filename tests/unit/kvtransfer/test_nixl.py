"""What only `nixl` does: its agents, its fence, and when it is chosen. All writes are real, over TCP."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.digest import MIX64
from kvtransfer import device_work, lane_thread, nixl_agent
from kvtransfer.base import DeviceMemory, Fingerprints, PoolMemory
from kvtransfer.connection import Connection
from kvtransfer.device_work import DeviceWork
from kvtransfer.frame import Frame, FrameType
from kvtransfer.nixl_agent import PACKAGES, Agent, load
from kvtransfer.pool import Pool
from kvtransfer.timing import Timing
from kvtransfer.transport import ListenOptions
from kvtransfer.transports import nixl
from tandem.errors import ConfigError, PeerLost, TransferError
from tests.kv_ends import (
    FAILED,
    PATIENCE_S,
    SOURCES,
    TARGETS,
    Pair,
    Recorder,
    ends,
    logged,
    paired,
    push_and_commit,
    until,
)
from tests.nixl_param import needs_nixl
from tests.transports import PRINTS, SharedPool

SOMEWHERE = {"memory": "DRAM", "device": "0", "addresses": "4096"}


def kv_threads() -> int:
    return sum(thread.name.startswith("kv-nixl") for thread in threading.enumerate())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_tasks() -> int:
    """Threads of ours and of NIXL's, as the kernel counts them: one that was joined is there a moment longer."""
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def pools(make_pool: Callable[..., Any]) -> tuple[Pool, Pool]:
    """A source and a target."""
    source, target = (Pool(make_pool().memory, PRINTS) for _ in range(2))
    return source, target


@needs_nixl
async def test_links_that_have_ended_leave_no_descriptor_and_no_thread() -> None:
    async with paired("nixl") as pair:  # what UCX keeps once it was used
        await pair.hand_over(Recorder())
    assert kv_threads() == 0
    before = num_descriptors(), num_tasks()
    for _ in range(3):
        async with paired("nixl") as pair:
            await pair.hand_over(Recorder())
            assert kv_threads() == 2
        assert (num_descriptors(), kv_threads()) == (before[0], 0)
    await until(lambda: num_tasks() <= before[1])


@needs_nixl
async def test_an_agent_whose_write_stood_still_leaves_no_descriptor(
    pools: tuple[Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing for a collection of garbage to end: what NIXL refuses to release, a frame may hold."""

    async def write_into_nowhere() -> None:
        receiving, sending = (Agent(pool) for pool in pools)
        metadata = await receiving.start(receiving.open)
        await sending.start(sending.open)
        await sending.start(partial(sending.join, metadata, receiving.region))
        for _ in range(2):
            with pytest.raises(PeerLost):
                await sending.write(range(16), range(16), tuple, patience_s=0.02)
        for agent in (sending, receiving):
            agent.end()
            await agent.ended()
        assert kv_threads() == 0

    def refused(self: Any) -> None:
        raise RuntimeError("it is under way")

    await write_into_nowhere()  # what UCX keeps once it was used
    before = num_descriptors()
    gc.disable()
    try:
        await write_into_nowhere()
        assert num_descriptors() == before
        monkeypatch.setattr(f"{nixl_agent.package()}._api.nixl_xfer_handle.release", refused)
        await write_into_nowhere()
        assert num_descriptors() == before
    finally:
        gc.enable()


@needs_nixl
async def test_a_connection_whose_agent_hangs_is_closed_and_its_blocks_stay_in_quarantine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lane_thread, "THREAD_ENDS_WITHIN_S", 0.05)
    hangs, listener = threading.Event(), Recorder()
    drop = Agent.drop

    def hanging(self: Agent) -> None:
        hangs.wait(PATIENCE_S)
        drop(self)

    monkeypatch.setattr(Agent, "drop", hanging)
    try:
        async with paired("nixl") as pair:
            handoff = await pair.begin(listener)
            await handoff.push(0, SOURCES)
            for session in tuple(pair.receiver._sessions.values()):
                session._connection._break(PeerLost("cut"))  # no BYE: only the agent's end would prove anything
            async with asyncio.timeout(PATIENCE_S / 2):  # longer would be the hanging thread
                await pair.sender.stop()
                await pair.receiver.stop()
        assert logged(caplog).count("kv thread left behind") == 2
        assert listener.calls == FAILED[:2]
    finally:
        hangs.set()
    await until(lambda: kv_threads() == 0)


@needs_nixl
async def test_a_receiver_looks_for_bytes_only_while_a_transfer_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    expect = nixl._ReceivingLane.expect

    def recorded(self: Any, num_transfers: int) -> None:
        told.append(num_transfers)
        expect(self, num_transfers)
        assert (self._stop_taking is None) == (num_transfers == 0)

    monkeypatch.setattr(nixl._ReceivingLane, "expect", recorded)
    async with paired("nixl") as pair:
        first = await pair.begin(Recorder(), (1,))
        second = await pair.begin(Recorder(), (2,))
        await first.push(0, (4,))
        await first.commit(b"")
        await second.abort()
        await until(lambda: len(told) == 4)
        assert told == [1, 2, 1, 0]
        await pair.hand_over(Recorder())


@needs_nixl
async def test_an_agent_that_has_ended_lets_nothing_in_that_was_on_its_way(pools: tuple[Pool, Pool]) -> None:
    source, target = pools
    receiving, sending = Agent(target), Agent(source)
    metadata = await receiving.start(receiving.open)
    await sending.start(sending.open)
    await sending.start(partial(sending.join, metadata, receiving.region))
    stop = threading.Event()
    taking = receiving.start(partial(receiving.take_in, stop))
    await sending.write((0,), (0,), tuple, PATIENCE_S)  # the way is open
    stop.set()
    await taking
    before = target.rows.array.copy()
    posted = threading.Event()

    def digests() -> tuple[int, ...]:
        posted.set()
        return ()

    writing = sending.write(range(16), range(16), digests, PATIENCE_S)
    await until(posted.is_set)  # it lies in the network: nobody takes it in
    await receiving.end()
    with pytest.raises(PeerLost):
        await writing
    assert (target.rows.array == before).all()
    with pytest.raises(PeerLost, match="has ended"):
        await sending.write((0,), (0,), tuple, PATIENCE_S)
    await sending.end()


@needs_nixl
async def test_a_write_that_stands_still_cuts_the_link_and_the_receiver_ends_the_access(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[FrameType] = []
    send, expect = Connection.send, nixl._ReceivingLane.expect

    def recorded(self: Connection, frame: Frame, *args: Any, **kwargs: Any) -> Any:
        if self._broken is None:
            said.append(frame.type)
        return send(self, frame, *args, **kwargs)

    monkeypatch.setattr(Connection, "send", recorded)
    monkeypatch.setattr(nixl._ReceivingLane, "expect", lambda self, num_transfers: None)
    async with paired("nixl", Timing(lease_s=PATIENCE_S, reply_s=PATIENCE_S, stop_s=PATIENCE_S)) as pair:
        handoff = await pair.begin(recorder)
        with monkeypatch.context() as impatient:  # no answer but that of this write may come too late
            write = Agent.write
            impatient.setattr(Agent, "write", lambda self, *args: write(self, *args[:3], patience_s=0.3))
            with pytest.raises(PeerLost, match=r"ended as PROC after 0\.3 s"):
                await handoff.push(0, SOURCES)
        await handoff.abort()
        await recorder.until("writer_stopped")
        assert recorder.calls == FAILED
        assert not {FrameType.ABORT, FrameType.DRAINED, FrameType.BYE, FrameType.WRITE} & set(said)
        monkeypatch.setattr(nixl._ReceivingLane, "expect", expect)
        await pair.hand_over(Recorder())  # over a new link


@needs_nixl
@pytest.mark.parametrize(
    "details",
    [
        {},
        {"agent": "!", **SOMEWHERE},
        {"agent": "bm8=", **SOMEWHERE},
        {"agent": "bm8=", **SOMEWHERE, "memory": "FILE"},
    ],
)
async def test_a_receiver_whose_agent_cannot_be_joined_is_refused(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, details: dict[str, str]
) -> None:
    async def prepare(self: Any) -> None:
        self.details = details

    monkeypatch.setattr(nixl._ReceivingLane, "prepare", prepare)
    async with paired("nixl") as pair:
        with pytest.raises(TransferError, match=r"agent|nixl|VRAM"):
            await pair.begin(recorder)
        assert recorder.calls == []


@needs_nixl
async def test_a_handshake_that_fails_leaves_no_agent(recorder: Recorder, make_pool: Any) -> None:
    async with paired("nixl") as pair:
        pair.sender._pool.fingerprints = Fingerprints("another model", PRINTS.layout)
        with pytest.raises(TransferError, match="model"):
            await pair.begin(recorder)
    assert kv_threads() == 0


class HostDevicePool(SharedPool):
    """On a device that is host memory here, which NIXL knows by the tensor; no block may pass through its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros_like(self.blocks)
        device = DeviceMemory(self.blocks, None, self.blocks.nbytes)
        self.memory = PoolMemory(self.rows, None, self.memory.incarnation, device=device)


@pytest.fixture
async def device_pair() -> AsyncIterator[Pair]:
    async with ends(HostDevicePool(), HostDevicePool(), "nixl", ("nixl",)) as pair:
        yield pair


@needs_nixl
async def test_pools_on_a_device_are_written_and_verified_there_past_their_rows(
    device_pair: Pair, recorder: Recorder
) -> None:
    handoff = await device_pair.begin(recorder)
    assert handoff._lane.verify == (MIX64,)
    await push_and_commit(handoff)
    assert device_pair.landed()
    assert not device_pair.source.rows.any()
    assert not device_pair.target.rows.any()


@needs_nixl
async def test_who_stops_waits_for_digests_that_still_read_a_pool_on_a_device(
    device_pair: Pair, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over, digests = threading.Event(), DeviceWork.digests

    def hang_at_the_receiver(self: DeviceWork, block_ids: Sequence[int]) -> tuple[int, ...]:
        return () if tuple(block_ids) == TARGETS and over.wait(PATIENCE_S) else digests(self, block_ids)

    monkeypatch.setattr(DeviceWork, "digests", hang_at_the_receiver)
    monkeypatch.setattr(device_work, "ANSWERS_WITHIN_S", 0.05)
    monkeypatch.setattr(lane_thread, "THREAD_ENDS_WITHIN_S", 0.5)
    handoff = await device_pair.begin(recorder)
    try:
        with pytest.raises(TransferError, match="the device did not answer within"):
            await push_and_commit(handoff)
        await device_pair.sender.stop()
        await device_pair.receiver.stop()
        assert "kv thread left behind" in logged(caplog)
    finally:
        over.set()


@needs_nixl
def test_no_process_of_this_host_is_written_to_behind_its_back() -> None:
    load()
    off = set(os.environ["UCX_TLS"].removeprefix("^").split(","))
    assert os.environ["UCX_TLS"].startswith("^")
    assert {"cma", "knem", "xpmem", "cuda_ipc"} <= off


@pytest.mark.parametrize(
    ("here", "fields", "reason"),
    [
        (True, {"tls": "off", "rdma": "on"}, None),
        (False, {"tls": "off", "rdma": "on"}, "RDMA device on both sides"),
        (True, {"tls": "off", "rdma": "off"}, "RDMA device on both sides"),
        (True, {"tls": "off"}, "RDMA device on both sides"),
        (True, {"tls": "on", "rdma": "on"}, "outside TLS"),
    ],
)
def test_auto_takes_it_only_over_rdma_and_where_no_tls_is_wanted(
    pools: tuple[Pool, Pool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: bool,
    fields: dict[str, str],
    reason: str | None,
) -> None:
    if here:
        (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nixl, "_RDMA_DEVICES", tmp_path)
    why_not = nixl.NixlTransport().unreachable(pools[0], fields)
    assert why_not is None if reason is None else reason in str(why_not)


def test_it_says_so_where_its_package_is_missing(pools: tuple[Pool, Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "load", load.__wrapped__)
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
    status = nixl.NixlTransport().probe(torch.device("cpu"))
    assert not status.usable
    assert "needs the package nixl" in status.reason
    with pytest.raises(ConfigError, match="nixl needs the package nixl"):
        nixl.NixlTransport().listen(pools[0], ListenOptions("127.0.0.1", 0, "127.0.0.1", None))


@pytest.mark.parametrize("package", PACKAGES)
def test_any_one_of_its_packages_alone_is_enough(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in PACKAGES:
        monkeypatch.delitem(sys.modules, each, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert nixl_agent.package() == "nixl"
    (tmp_path / f"{package}.py").touch()
    assert nixl_agent.package() == package
