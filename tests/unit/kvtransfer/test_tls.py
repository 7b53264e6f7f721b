"""Hand-offs inside TLS, and everybody who does not belong there."""

import asyncio
import dataclasses
import ssl
from contextlib import asynccontextmanager

import pytest
import torch
import uvloop

from kvtransfer import receiver as receiver_module
from kvtransfer.base import BlockRef, Fingerprints
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.timing import Timing
from kvtransfer.transports import tcp
from tandem.errors import HandshakeMismatch, TransferError
from tandem.kv_layout import DType, KvLayout
from tandem.types import BlockId
from tests.manual_clock import ManualClock
from tests.pki import LOOPBACK, Pki

PATIENCE_S = 20.0
QUICK = Timing(lease_s=1.5, reply_s=2.0, stop_s=1.0)
LARGE = KvLayout(num_layers=4, num_kv_heads=4, block_size=128, head_dim=128, dtype=DType.BFLOAT16)


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path)


@pytest.fixture
def stranger(tmp_path):
    return Pki(tmp_path, "stranger")


@pytest.fixture
def tls_pair(make_pool, prints):
    """`async with tls_pair(server, client) as (receiver, sender, source, target)`; None = plain."""

    @asynccontextmanager
    async def opened(server, client, transports=("tcp",), fingerprints=prints, num_blocks=16, timing=QUICK):
        block_bytes = fingerprints.layout.block_bytes
        source, target = make_pool(num_blocks, block_bytes), make_pool(num_blocks, block_bytes)
        clock = ManualClock()
        receiver = KvReceiver(target.memory, fingerprints, clock, transports, LOOPBACK, tls=server, timing=timing)
        transport = "auto" if len(transports) > 1 else transports[0]
        sender = KvSender(source.memory, fingerprints, clock, transport, tls=client, timing=timing)
        await receiver.start()
        try:
            yield receiver, sender, source, target
        finally:
            await sender.stop()
            await receiver.stop()

    return opened


async def hand_over(receiver, sender, offer, listener, blocks=(3, 1, 2)):
    return await carry_out(sender, offer(receiver, listener, blocks), listener, blocks)


async def carry_out(sender, issued, listener, blocks=(3, 1, 2)):
    handoff = await sender.open(issued.ticket, issued.endpoint, PATIENCE_S)
    await handoff.push(0, blocks)
    report = await handoff.commit(b"first token")
    assert listener.calls == ["receiving", "committed"]
    return report


@pytest.fixture
def offer():
    def issue(receiver, listener, blocks=(3, 1, 2)):
        return receiver.offer(tuple(BlockRef(BlockId(i), 1) for i in blocks), listener, 30.0)

    return issue


@pytest.mark.parametrize("mutual", [False, True])
async def test_blocks_arrive_as_they_were_sent(pki, tls_pair, offer, recorder, mutual):
    server, client = pki.server(pki.issue(), mutual=mutual), pki.caller(pki.issue("prefill") if mutual else None)
    async with tls_pair(server, client) as (receiver, sender, source, target):
        report = await hand_over(receiver, sender, offer, recorder)
        assert torch.equal(source.blocks[[3, 1, 2]], target.blocks[[3, 1, 2]])
        assert report.transport == "tcp"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_blocks_of_a_megabyte_arrive_on_either_loop(pki, tls_pair, offer, recorder, run):
    async def main():
        prints = Fingerprints("model-a", LARGE)
        server, client = pki.server(pki.issue()), pki.caller()
        async with tls_pair(server, client, fingerprints=prints, num_blocks=6) as (receiver, sender, source, target):
            await hand_over(receiver, sender, offer, recorder, (4, 0, 1, 2))
            assert torch.equal(source.blocks[[4, 0, 1, 2]], target.blocks[[4, 0, 1, 2]])

    run(main())


async def test_nothing_of_a_block_crosses_in_clear(pki, tls_pair, offer, recorder, monkeypatch):
    """What leaves through the socket holds neither the block's bytes nor the protocol's magic."""
    loop, sent = asyncio.get_running_loop(), bytearray()
    send = loop.sock_sendall

    async def listening_in(sock, data):
        sent.extend(data)
        await send(sock, data)

    monkeypatch.setattr(loop, "sock_sendall", listening_in)
    async with tls_pair(pki.server(pki.issue()), pki.caller()) as (receiver, sender, source, _):
        await hand_over(receiver, sender, offer, recorder)
        assert len(sent) > 3 * source.blocks.shape[1]
        assert bytes(source.blocks[3].numpy())[:16] not in sent
        assert b"TKV\n" not in sent


async def test_shared_memory_stays_as_it_is(pki, tls_pair, offer, recorder):
    async with tls_pair(pki.server(pki.issue(), mutual=True), pki.caller(), ("shm", "tcp")) as (receiver, sender, *_):
        assert (await hand_over(receiver, sender, offer, recorder)).transport == "shm"


@pytest.mark.parametrize(
    ("serving", "calling", "said"),
    [
        (lambda own, other: own.server(own.issue()), lambda own, other: other.caller(), "unable to get local issuer"),
        (lambda own, other: own.server(own.issue(days=-1)), lambda own, other: own.caller(), "has expired"),
        (lambda own, other: own.server(own.issue("b.example")), lambda own, other: own.caller(), "not valid for"),
        (
            lambda own, other: own.server(own.issue(), mutual=True),
            lambda own, other: own.caller(),
            "certificate required",
        ),
        (
            lambda own, other: own.server(own.issue(), mutual=True),
            lambda own, other: own.caller(other.issue("prefill")),
            "unknown ca",
        ),
        (
            lambda own, other: own.server(own.issue(), mutual=True),
            lambda own, other: own.caller(own.issue("prefill", days=-1)),
            "certificate expired",
        ),
    ],
    ids=["wrong authority", "expired", "another name", "no certificate", "caller unknown", "caller expired"],
)
async def test_who_does_not_belong_is_refused_with_the_reason(
    pki, stranger, tls_pair, offer, recorder, serving, calling, said
):
    async with tls_pair(serving(pki, stranger), calling(pki, stranger)) as (receiver, sender, *_):
        issued = offer(receiver, recorder)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TransferError, match=said):
                await sender.open(issued.ticket, issued.endpoint, PATIENCE_S)
        assert recorder.calls == []


@pytest.mark.parametrize(("secure_receiver", "ours", "theirs"), [(True, "off", "on"), (False, "on", "off")])
async def test_one_side_with_tls_and_one_without_refuse_each_other_by_name(
    pki, tls_pair, offer, recorder, secure_receiver, ours, theirs
):
    server = pki.server(pki.issue()) if secure_receiver else None
    client = None if secure_receiver else pki.caller()
    async with tls_pair(server, client) as (receiver, sender, *_):
        issued = offer(receiver, recorder)
        with pytest.raises(HandshakeMismatch, match=f"tls differs: ours {ours}, theirs {theirs}"):
            await sender.open(issued.ticket, issued.endpoint, PATIENCE_S)
        assert recorder.calls == []


@pytest.mark.parametrize("secure_receiver", [True, False])
async def test_an_endpoint_that_lies_about_tls_ends_in_a_refusal_not_a_hang(
    pki, tls_pair, offer, recorder, caplog, secure_receiver
):
    server = pki.server(pki.issue()) if secure_receiver else None
    client = None if secure_receiver else pki.caller()
    async with tls_pair(server, client) as (receiver, sender, *_):
        issued = offer(receiver, recorder)
        lie = (
            issued.endpoint.replace(b"tls=on", b"tls=off")
            if secure_receiver
            else issued.endpoint.replace(b"tls=off", b"tls=on")
        )
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TransferError):
                await sender.open(issued.ticket, lie, PATIENCE_S)
        said = "no TLS with the peer" if secure_receiver else "the peer speaks TLS"
        async with asyncio.timeout(PATIENCE_S):
            while said not in caplog.text:  # noqa: ASYNC110  the receiver's log comes when it comes
                await asyncio.sleep(0.01)
        assert recorder.calls == []


@pytest.mark.parametrize("host", ["", ".example", "a" * 70])
async def test_an_endpoint_whose_host_is_none_is_refused(pki, tls_pair, offer, recorder, host):
    async with tls_pair(pki.server(pki.issue()), pki.caller()) as (receiver, sender, *_):
        issued = offer(receiver, recorder)
        known = Endpoint.decode(issued.endpoint)
        endpoint = dataclasses.replace(known, reach={"tcp": known.reach["tcp"] | {"host": host}}).encode()
        with pytest.raises(TransferError):
            await sender.open(issued.ticket, endpoint, PATIENCE_S)


async def test_garbage_on_a_tls_port_ends_its_own_connection_only(pki, tls_pair, offer, recorder):
    async with tls_pair(pki.server(pki.issue()), pki.caller()) as (receiver, sender, *_):
        issued = offer(receiver, recorder)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" + bytes(600), b"\x00", b"TKV\n" * 100):
            async with raw_connection(issued) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, garbage)
        await carry_out(sender, issued, recorder)


@asynccontextmanager
async def raw_connection(issued):
    fields = Endpoint.decode(issued.endpoint).reach["tcp"]
    sock = await tcp.dial(fields["host"], int(fields["port"]))
    try:
        yield sock
    finally:
        sock.close()


@pytest.mark.parametrize("secured", [True, False])
async def test_a_peer_that_drips_bytes_is_cut_off_in_time(pki, tls_pair, offer, recorder, secured):
    """Each byte would renew the patience for the next; the handshake as a whole has a deadline."""
    server = pki.server(pki.issue()) if secured else None
    async with tls_pair(server, None) as (receiver, *_), raw_connection(offer(receiver, recorder)) as sock:
        loop = asyncio.get_running_loop()
        hello = b"\x16\x03\x01\x02\x00" if secured else Frame(FrameType.HEARTBEAT).encode()[:5]
        started_s = loop.time()

        async def drip():
            for byte in hello * 100:
                await loop.sock_sendall(sock, bytes([byte]))
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(PATIENCE_S):  # the dripping takes longer
            while await loop.sock_recv(sock, 1024):
                pass
        assert loop.time() - started_s < 3 * QUICK.lease_s
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)


async def test_only_so_many_may_shake_hands_at_a_time(pki, tls_pair, offer, recorder, monkeypatch):
    monkeypatch.setattr(receiver_module, "MAX_HANDSHAKES", 2)
    slow = dataclasses.replace(QUICK, lease_s=PATIENCE_S)
    async with tls_pair(pki.server(pki.issue()), pki.caller(), timing=slow) as (receiver, sender, *_):
        loop = asyncio.get_running_loop()
        issued = offer(receiver, recorder)
        async with raw_connection(issued), raw_connection(issued), raw_connection(issued) as third:
            async with asyncio.timeout(slow.lease_s / 2):
                assert await loop.sock_recv(third, 1) == b""
        assert await opens_in_the_end(sender, issued)


async def opens_in_the_end(sender, issued):
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await (await sender.open(issued.ticket, issued.endpoint, PATIENCE_S)).abort()
                return True
            except TransferError:  # the receiver has yet to notice who left
                await asyncio.sleep(0.01)


async def test_a_new_certificate_is_shown_to_new_senders_and_open_hand_offs_go_on(
    pki, stranger, tls_pair, offer, make_recorder, make_pool, prints
):
    shown = pki.issue()
    async with tls_pair(pki.server(shown), pki.caller()) as (receiver, sender, source, target):
        running = make_recorder()
        issued = offer(receiver, running)
        handoff = await sender.open(issued.ticket, issued.endpoint, PATIENCE_S)
        await handoff.push(0, (3,))
        shown.show(stranger.issue())

        newcomer = KvSender(make_pool().memory, prints, ManualClock(), "tcp", tls=stranger.caller(), timing=QUICK)
        await hand_over(receiver, newcomer, offer, make_recorder(), (7, 8, 9))
        await newcomer.stop()

        await handoff.push(1, (1, 2))
        await handoff.commit(b"")
        assert running.calls == ["receiving", "committed"]
        assert torch.equal(source.blocks[[3, 1, 2]], target.blocks[[3, 1, 2]])


def test_the_context_of_a_sender_checks_the_name(pki):
    context = pki.caller().context()
    assert context.check_hostname
    assert context.verify_mode == ssl.CERT_REQUIRED
