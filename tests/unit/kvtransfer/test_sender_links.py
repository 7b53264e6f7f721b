"""The sender's links: forgotten when their peers go, and never in the way of those who open meanwhile."""

import asyncio
import dataclasses
import socket

import pytest

from kvtransfer.endpoint import Endpoint
from tandem.errors import PeerLost, TransferError


async def test_hand_offs_opened_together_after_several_peers_went_all_open(paired, make_recorder):
    async with paired("tcp") as current, paired("tcp") as one, paired("tcp") as other:
        offers = [former.offer(make_recorder()) for former in (one, other)]
        lost = [await current.open(offer) for offer in offers]
        for former, handoff in zip((one, other), lost, strict=True):
            await former.receiver.stop()
            with pytest.raises(TransferError):
                await handoff.commit(b"")
        offers = [current.offer(make_recorder(), (block,)) for block in (1, 2, 3)]

        handoffs = await asyncio.gather(*map(current.open, offers))

        for handoff in handoffs:
            await handoff.push(0, (0,))
            await handoff.commit(b"")
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a link was forgotten and never closed"


async def test_a_sender_that_stops_tells_those_who_still_dial(paired, recorder):
    async with paired("tcp") as pair:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            offer = pair.offer(recorder)
            known = Endpoint.decode(offer.endpoint)
            port = str(silent.getsockname()[1])
            endpoint = dataclasses.replace(known, reach={"tcp": known.reach["tcp"] | {"port": port}})
            opening = asyncio.create_task(pair.sender.open(offer.ticket, endpoint.encode(), 5.0))
            accepted, _ = await asyncio.to_thread(silent.accept)
            with accepted:
                await pair.sender.stop()
                with pytest.raises(PeerLost, match="given up"):
                    await opening
