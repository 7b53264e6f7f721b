"""Which transport a sender takes, and how it says why."""

import dataclasses
import logging

import pytest

from kvtransfer.base import Offer
from kvtransfer.endpoint import Endpoint
from kvtransfer.transport import TransportStatus
from kvtransfer.transports.shm import ShmTransport
from tandem.errors import PeerLost, TransferError


def elsewhere(offer: Offer, **shm: str) -> bytes:
    """The offer's endpoint, where shm says so of itself."""
    known = Endpoint.decode(offer.endpoint)
    return dataclasses.replace(known, reach=known.reach | {"shm": {**known.reach["shm"], **shm}}).encode()


async def test_the_choice_and_what_spoke_against_better_ones_is_logged_once(paired, make_recorder, caplog):
    caplog.set_level(logging.INFO, logger="kvtransfer.sender")
    async with paired("auto") as pair:
        for block in (1, 2):
            offer = pair.offer(make_recorder(), (block,))
            handoff = await pair.sender.open(offer.ticket, elsewhere(offer, boot_id="another"), 5.0)
            await handoff.abort()
    (line,) = caplog.messages
    assert line.startswith("kv goes over tcp to incarnation ")
    assert "; not over shm: it is on another machine" in line
    assert "cuda_ipc" not in line, "neither side has it for a pool in host memory"


async def test_a_transport_that_did_not_answer_is_among_the_reasons(paired, make_recorder, caplog):
    caplog.set_level(logging.INFO, logger="kvtransfer.sender")
    async with paired("auto") as pair:
        offer = pair.offer(make_recorder())
        handoff = await pair.sender.open(offer.ticket, elsewhere(offer, unix_name="gone"), 5.0)
        await handoff.abort()
    (line,) = caplog.messages
    assert "not over shm: cannot connect over shm: Connection refused" in line


async def test_the_best_transport_needs_no_reason(paired, make_recorder, caplog):
    caplog.set_level(logging.INFO, logger="kvtransfer.sender")
    async with paired("auto") as pair:
        await (await pair.open(pair.offer(make_recorder()))).abort()
    (line,) = caplog.messages
    assert line.startswith("kv goes over shm to ")
    assert "not over" not in line


async def test_a_forced_transport_that_fails_says_what_spoke_against_it(paired, make_recorder):
    async with paired("shm") as pair:
        offer = pair.offer(make_recorder())
        endpoint = elsewhere(offer, boot_id="another", unix_name="gone")
        with pytest.raises(
            TransferError, match="cannot connect over shm: Connection refused; it is on another machine"
        ):
            await pair.sender.open(offer.ticket, endpoint, 5.0)


async def test_a_forced_transport_is_tried_whatever_it_says_of_itself(paired, make_recorder):
    async with paired("shm") as pair:
        offer = pair.offer(make_recorder())
        await (await pair.sender.open(offer.ticket, elsewhere(offer, boot_id="another"), 5.0)).abort()


async def test_without_a_common_transport_each_is_named_with_its_reason(paired, make_recorder):
    async with paired("auto", offered=("shm",)) as pair:
        offer = pair.offer(make_recorder())
        message = "the peer offers shm. shm: it belongs to another user; .*tcp: not offered by the peer"
        with pytest.raises(TransferError, match=message):
            await pair.sender.open(offer.ticket, elsewhere(offer, uid="1"), 5.0)


async def test_the_loss_of_a_peer_stays_one(paired, make_recorder):
    async with paired("auto", offered=("shm",)) as pair:
        offer = pair.offer(make_recorder())
        with pytest.raises(PeerLost, match="cannot connect over shm"):
            await pair.sender.open(offer.ticket, elsewhere(offer, unix_name="gone"), 5.0)


async def test_a_transport_of_the_peer_that_does_not_work_here_is_named_with_the_reason(
    paired, make_recorder, monkeypatch
):
    monkeypatch.setattr(ShmTransport, "probe", lambda *_: TransportStatus("shm", False, "needs Linux"))
    async with paired("auto", offered=("shm",)) as pair:
        with pytest.raises(TransferError, match=r"the peer offers shm\. shm: needs Linux; .*tcp: not offered"):
            await pair.open(pair.offer(make_recorder()))
