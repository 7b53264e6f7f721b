"""Which transport a sender takes, and how it says why."""

from __future__ import annotations

import logging

import pytest

from kvtransfer.transport import TransportStatus
from kvtransfer.transports.shm import ShmTransport
from tandem.errors import PeerLost, TransferError
from tests.kv_ends import Recorder, paired, push_and_commit, rerouted


@pytest.mark.parametrize(
    ("changed", "transport", "reason"),
    [
        ({}, "shm", None),
        ({"boot_id": "another"}, "tcp", "shm: it is on another machine"),
        ({"unix_name": "gone"}, "tcp", "shm: cannot connect over shm: Connection refused"),
    ],
)
async def test_the_choice_and_what_spoke_against_better_ones_is_logged_once(caplog, changed, transport, reason):
    caplog.set_level(logging.INFO, logger="kvtransfer.sender")
    async with paired("auto") as pair:
        for block in (1, 2):
            handoff = await pair.open(rerouted(pair.offer(Recorder(), (block,)), "shm", **changed))
            report = await push_and_commit(handoff, (0,))
            assert report.transport == transport
    (record,) = caplog.records
    assert (record.getMessage(), record.fields["transport"]) == ("kv transport chosen", transport)
    passed_over = record.fields["passed_over"]
    assert passed_over.startswith(reason) if reason else not passed_over
    assert report.passed_over == passed_over
    assert "cuda_ipc" not in passed_over, "neither side has it for a pool in host memory"


async def test_a_forced_transport_is_tried_whatever_it_says_of_itself_and_says_so_where_it_fails():
    async with paired("shm") as pair:
        offer = rerouted(pair.offer(Recorder()), "shm", boot_id="another")
        await (await pair.open(offer)).abort()
        reasons = "cannot connect over shm: Connection refused; it is on another machine"
        with pytest.raises(PeerLost, match=reasons):
            await pair.open(rerouted(offer, "shm", unix_name="gone"))


async def test_a_fixed_transport_that_the_peer_lacks_is_a_clear_error():
    async with paired("shm", offered=("tcp",)) as pair:
        with pytest.raises(TransferError, match="transport shm is not offered by the peer, which has tcp"):
            await pair.begin(Recorder())


async def test_without_a_common_transport_each_is_named_with_its_reason(monkeypatch):
    async with paired("auto", offered=("shm",)) as pair:
        offer = rerouted(pair.offer(Recorder()), "shm", uid="1")
        message = "the peer offers shm. shm: it belongs to another user; .*tcp: not offered by the peer"
        with pytest.raises(TransferError, match=message):
            await pair.open(offer)
        monkeypatch.setattr(ShmTransport, "probe", lambda *_: TransportStatus("shm", False, "needs Linux"))
    async with paired("auto", offered=("shm",)) as pair:
        with pytest.raises(TransferError, match=r"the peer offers shm\. shm: needs Linux; .*tcp: not offered"):
            await pair.begin(Recorder())
