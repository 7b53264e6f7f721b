"""A process is caught in the middle of a copy into another one's GPU memory, over the stand-in for the driver."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.base import Offer
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from shell.clock import MonotonicClock
from tandem.errors import TransferError
from tandem.types import BlockId
from tests import held
from tests.faults import kv_peer
from tests.faults.kv_peer import FILL, PATIENCE_S, Forked, heard
from tests.faults.leases import Leases
from tests.kv_ends import FAILED, RECEIVED, Recorder, push_and_commit, refs_of, until
from tests.standins.build import obstacle
from tests.standins.cuda import StandInCuda, fresh, standin
from tests.transports import PRINTS, TestPool, make_pool

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=f"cuda_ipc: {obstacle()}")

TRANSPORT = "cuda_ipc"
PATIENT = Timing(lease_s=60.0, reply_s=60.0, stop_s=1.0)
"""No silence is noticed: what else ends a hand-off is seen as such."""
TARGET = BlockId(3)
LAST_BYTE = PRINTS.layout.block_bytes - 1


async def _push_one(pipe: Pipe, settings: dict[str, str]) -> None:
    cuda, pool = standin(), make_pool(TRANSPORT)
    pool.blocks.fill_(FILL)
    for name, value in settings.items():
        cuda.set(name, value)
    sender = KvSender(pool.memory, PRINTS, MonotonicClock(), TRANSPORT, timing=PATIENT)
    ticket, endpoint = await heard(pipe)
    handoff = await sender.open(ticket, endpoint, PATIENCE_S)
    error = ""
    try:
        await handoff.push(0, (BlockId(0),))
        await handoff.commit(b"")
    except TransferError as failure:
        error = str(failure)
        await handoff.abort()
    pipe.send(("ended", error))
    await sender.stop()
    pipe.send(("stopped",))
    await heard(pipe)


def _run(pipe: Pipe, settings: dict[str, str]) -> None:
    asyncio.run(_push_one(pipe, settings))


class SendingPeer(Forked):
    """A process whose driver has `settings`, and that hands one block over."""

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__(_run, settings)


@dataclass
class Scene:
    """A receiver here, and an offer of one block that the other process was given."""

    pool: TestPool
    receiver: KvReceiver
    listener: Recorder
    peer: SendingPeer
    offer: Offer

    async def half_written(self) -> None:
        await until(lambda: self.pool.blocks[TARGET, 0] == FILL, PATIENCE_S)
        assert self.pool.blocks[TARGET, LAST_BYTE] == 0

    async def is_served(self, offer: Offer) -> None:
        """A sender here hands block 5 over."""
        source = make_pool(TRANSPORT)
        sender = KvSender(source.memory, PRINTS, MonotonicClock(), TRANSPORT, timing=PATIENT)
        await push_and_commit(await sender.open(offer.ticket, offer.endpoint, PATIENCE_S), (5,))
        assert self.pool.blocks[TARGET].equal(source.blocks[5])
        await sender.stop()
        source.close()

    def quarantined(self) -> bool:
        return self.listener.calls == FAILED[:2] and self.receiver.num_live == 1


@pytest.fixture
async def cuda() -> AsyncIterator[StandInCuda]:
    kv_peer.warm_up()
    standin()
    async with held.nothing_stays():
        with fresh() as standin_cuda:
            yield standin_cuda


@pytest.fixture
def hold(tmp_path: Path) -> Any:
    (path := tmp_path / "hold").touch()
    return path


@asynccontextmanager
async def sending(**settings: object) -> AsyncIterator[Scene]:
    pool, listener = make_pool(TRANSPORT), Recorder(patience_s=PATIENCE_S)
    peer = SendingPeer({name: str(value) for name, value in settings.items()})
    pool.blocks.zero_()
    receiver = KvReceiver(pool.memory, PRINTS, MonotonicClock(), (TRANSPORT,), "127.0.0.1", timing=PATIENT)
    await receiver.start()
    try:
        offer = receiver.offer(refs_of((TARGET,)), listener, PATIENCE_S)
        peer.tell(offer.ticket, offer.endpoint)
        yield Scene(pool, receiver, listener, peer, offer)
    finally:
        peer.close()
        await receiver.stop()
        pool.close()


@pytest.mark.usefixtures("cuda")
async def test_a_sender_killed_in_the_middle_of_a_copy_frees_the_block_for_the_next(hold: Any) -> None:
    async with sending(HOLD=hold) as scene:
        await scene.half_written()
        scene.peer.signal(signal.SIGKILL)
        await scene.listener.until("writer_stopped")
        assert scene.listener.calls == FAILED
        assert scene.pool.blocks[TARGET, LAST_BYTE] == 0
        await scene.is_served(scene.receiver.offer(refs_of((TARGET,), 8), Recorder(), PATIENCE_S))


@pytest.mark.usefixtures("cuda")
async def test_blocks_withdrawn_in_the_middle_of_a_copy_wait_for_its_end(hold: Any) -> None:
    async with sending(HOLD=hold) as scene:
        await scene.half_written()
        scene.receiver.withdraw(scene.offer.transfer_id)
        assert scene.quarantined()
        hold.unlink()
        word, error = await scene.peer.hear()
        assert (word, bool(error)) == ("ended", True)
        await scene.listener.until("writer_stopped")
        assert scene.pool.blocks[TARGET, LAST_BYTE] == FILL


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("wakes", [True, False])
async def test_a_sender_that_stands_still_in_a_copy_keeps_the_block_until_it_lets_go_or_dies(
    hold: Any, wakes: bool, leases: Leases
) -> None:
    async with sending(HOLD=hold) as scene:
        await scene.half_written()
        scene.peer.signal(signal.SIGSTOP)
        leases.shorten()
        await scene.listener.until("failed")
        assert scene.quarantined()
        hold.unlink()
        scene.peer.signal(signal.SIGCONT if wakes else signal.SIGKILL)
        await scene.listener.until("writer_stopped")
        assert scene.listener.calls == FAILED


@pytest.mark.usefixtures("cuda")
async def test_after_a_fault_on_the_senders_gpu_only_its_death_frees_the_block() -> None:
    async with sending(FAIL="copy:1:719") as scene:
        word, error = await scene.peer.hear()
        assert word == "ended"
        assert "CUDA_ERROR_LAUNCH_FAILED" in error
        assert await scene.peer.hear() == ("stopped",)
        await scene.listener.until("failed")
        assert scene.quarantined()
        scene.peer.signal(signal.SIGKILL)
        await scene.listener.until("writer_stopped")
        assert scene.receiver.num_live == 0


@pytest.mark.usefixtures("cuda")
async def test_a_process_without_descriptors_left_is_refused_and_harms_nobody() -> None:
    async with sending(FAIL="cuMemImportFromShareableHandle:1:304") as scene:
        with pytest.raises(EOFError):  # the forced transport's refusal ends the process
            await scene.peer.hear()
        assert scene.listener.calls == []
        await scene.is_served(scene.offer)
        assert scene.listener.calls == RECEIVED
