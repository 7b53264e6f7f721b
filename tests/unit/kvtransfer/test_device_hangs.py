"""A device that does not answer: whatever waits for it ends in time, and what is not proven stays in quarantine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtransfer import device_work, lane_thread
from kvtransfer.device_work import DeviceWork
from kvtransfer.transports.cuda_ipc import _Copier
from tandem.errors import TransferError
from tests.kv_ends import FAILED, PATIENCE_S, SOURCES, TARGETS, Recorder, logged, paired, push_and_commit
from tests.standins.cuda import StandInCuda

ENDS_WITHIN_S = 5.0
"""Far less than a thread hangs here."""
LEFT_BEHIND = "kv thread left behind"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_work, "ANSWERS_WITHIN_S", 0.05)
    monkeypatch.setattr(lane_thread, "THREAD_ENDS_WITHIN_S", 0.05)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when the test is over: until then, threads hang. Afterwards none may be left."""
    event = threading.Event()
    yield event
    event.set()
    for thread in _device_threads():
        thread.join(PATIENCE_S)
    assert not _device_threads()


def _device_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kv-device")]


async def test_a_copy_that_hangs_fails_its_hand_off_and_keeps_its_blocks_in_quarantine(
    recorder: Recorder, cuda: StandInCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (hold := tmp_path / "hold").touch()
    async with paired("cuda_ipc") as pair:
        handoff = await pair.begin(recorder)
        cuda.set("HOLD", hold)
        async with asyncio.timeout(ENDS_WITHIN_S):
            with pytest.raises(TransferError, match="the device did not answer within"):
                await handoff.push(0, SOURCES)
            await handoff.abort()
            await pair.sender.stop()
        assert LEFT_BEHIND in logged(caplog)
        await recorder.until("failed")
        assert (recorder.calls, pair.receiver.num_live) == (FAILED[:2], 1)
        hold.unlink()
        for thread in _device_threads():
            await asyncio.to_thread(thread.join, PATIENCE_S)


async def test_a_pool_that_stays_mapped_is_never_said_to_be_unmapped(
    recorder: Recorder, cuda: StandInCuda, over: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    close = _Copier.close

    def hanging(self: _Copier) -> None:
        over.wait(PATIENCE_S)
        close(self)

    monkeypatch.setattr(_Copier, "close", hanging)
    async with paired("cuda_ipc") as pair:
        handoff = await pair.begin(recorder)
        await handoff.push(0, SOURCES)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await pair.sender.stop()
        assert LEFT_BEHIND in logged(caplog)
        await recorder.until("failed")
        assert (recorder.calls, pair.receiver.num_live) == (FAILED[:2], 1)


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
async def test_a_receiver_whose_digests_hang_fails_the_hand_off_and_stops(
    recorder: Recorder, over: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, transport: str
) -> None:
    digests = DeviceWork.digests

    def hang_at_the_receiver(self: DeviceWork, block_ids: Sequence[int]) -> tuple[int, ...]:
        return () if tuple(block_ids) == TARGETS and over.wait(PATIENCE_S) else digests(self, block_ids)

    monkeypatch.setattr(DeviceWork, "digests", hang_at_the_receiver)
    async with paired(transport) as pair:
        handoff = await pair.begin(recorder)
        async with asyncio.timeout(ENDS_WITHIN_S):
            with pytest.raises(TransferError, match="the device did not answer within"):
                await push_and_commit(handoff)
            await pair.sender.stop()
            await pair.receiver.stop()
        assert LEFT_BEHIND in logged(caplog)
        assert recorder.calls == FAILED
