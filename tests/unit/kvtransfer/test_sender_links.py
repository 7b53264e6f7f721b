"""The sender's links: forgotten when their peers go, and never in the way of those who open meanwhile."""

import asyncio
import socket

import pytest

from tandem.errors import PeerLost, TransferError
from tests.kv_ends import Recorder, paired, push_and_commit, rerouted


async def test_hand_offs_opened_together_after_several_peers_went_all_open():
    async with paired("tcp") as current, paired("tcp") as one, paired("tcp") as other:
        offers = [former.offer(Recorder()) for former in (one, other)]
        lost = [await current.open(offer) for offer in offers]
        for former, handoff in zip((one, other), lost, strict=True):
            await former.receiver.stop()
            with pytest.raises(TransferError):
                await handoff.commit(b"")
        offers = [current.offer(Recorder(), (block,)) for block in (1, 2, 3)]

        handoffs = await asyncio.gather(*map(current.open, offers))

        for handoff in handoffs:
            await push_and_commit(handoff, (0,))
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a link was forgotten and never closed"


async def test_a_sender_that_stops_tells_those_who_still_dial(recorder):
    async with paired("tcp") as pair:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            offer = pair.offer(recorder)
            opening = asyncio.create_task(pair.open(rerouted(offer, "tcp", port=str(silent.getsockname()[1]))))
            accepted, _ = await asyncio.to_thread(silent.accept)
            with accepted:
                await pair.sender.stop()
                with pytest.raises(PeerLost, match="given up"):
                    await opening
