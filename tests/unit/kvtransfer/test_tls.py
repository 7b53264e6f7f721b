"""Hand-offs inside TLS, and everybody who does not belong there."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import pytest
import uvloop

from kvtransfer import receiver as receiver_module
from kvtransfer.base import Fingerprints
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import Frame, FrameType
from kvtransfer.sender import KvSender
from kvtransfer.transports import tcp
from tandem.errors import HandshakeMismatch, TransferError
from tandem.kv_layout import DType, KvLayout
from tests.kv_ends import PATIENCE_S, QUICK, RECEIVED, SOURCES, Recorder, ends, logged, push_and_commit, rerouted, until
from tests.manual_clock import ManualClock
from tests.pki import Pki
from tests.transports import PRINTS, SharedPool

LARGE = KvLayout(num_layers=4, num_kv_heads=4, block_size=128, head_dim=128, dtype=DType.BFLOAT16)


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path)


@pytest.fixture
def stranger(tmp_path):
    return Pki(tmp_path, "stranger")


def tls_pair(server, client, transports=("tcp",), prints=PRINTS, num_blocks=16, timing=QUICK):
    """`async with tls_pair(server, client) as pair`; None = plain."""
    pools = (SharedPool(num_blocks, prints.layout.block_bytes) for _ in range(2))
    transport = "auto" if len(transports) > 1 else transports[0]
    return ends(*pools, transport, transports, timing, prints=prints, sender={"tls": client}, receiver={"tls": server})


@pytest.mark.parametrize("mutual", [False, True])
async def test_blocks_arrive_as_they_were_sent(pki, recorder, mutual):
    server, client = pki.server(pki.issue(), mutual=mutual), pki.caller(pki.issue("prefill") if mutual else None)
    async with tls_pair(server, client) as pair:
        assert (await pair.hand_over(recorder)).transport == "tcp"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_blocks_of_a_megabyte_arrive_on_either_loop(pki, recorder, run):
    async def main():
        large = Fingerprints("model-a", LARGE)
        async with tls_pair(pki.server(pki.issue()), pki.caller(), prints=large, num_blocks=6) as pair:
            await pair.hand_over(recorder, (4, 0, 1, 2), (3, 5, 2, 0))

    run(main())


async def test_nothing_of_a_block_crosses_in_clear(pki, recorder, monkeypatch):
    """What leaves through the socket holds neither the block's bytes nor the protocol's magic."""
    loop, sent = asyncio.get_running_loop(), bytearray()
    send = loop.sock_sendall

    async def listening_in(sock, data):
        sent.extend(data)
        await send(sock, data)

    monkeypatch.setattr(loop, "sock_sendall", listening_in)
    async with tls_pair(pki.server(pki.issue()), pki.caller()) as pair:
        await pair.hand_over(recorder)
        assert len(sent) > 3 * pair.source.blocks.shape[1]
        assert bytes(pair.source.blocks[9].numpy())[:16] not in sent
        assert b"TKV\n" not in sent


async def test_shared_memory_stays_as_it_is(pki, recorder):
    server = pki.server(pki.issue(), mutual=True)
    async with tls_pair(server, pki.caller(), ("shm", "tcp")) as pair:
        assert (await pair.hand_over(recorder)).transport == "shm"


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
async def test_who_does_not_belong_is_refused_with_the_reason(pki, stranger, recorder, serving, calling, said):
    async with tls_pair(serving(pki, stranger), calling(pki, stranger)) as pair:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TransferError, match=said):
                await pair.begin(recorder)
        assert recorder.calls == []


@pytest.mark.parametrize(("secure_receiver", "ours", "theirs"), [(True, "off", "on"), (False, "on", "off")])
async def test_one_side_with_tls_and_one_without_refuse_each_other_by_name(
    pki, recorder, secure_receiver, ours, theirs
):
    server = pki.server(pki.issue()) if secure_receiver else None
    client = None if secure_receiver else pki.caller()
    async with tls_pair(server, client) as pair:
        with pytest.raises(HandshakeMismatch, match=f"tls differs: ours {ours}, theirs {theirs}"):
            await pair.begin(recorder)
        assert recorder.calls == []


@pytest.mark.parametrize("secure_receiver", [True, False])
async def test_an_endpoint_that_lies_about_tls_ends_in_a_refusal_not_a_hang(pki, recorder, caplog, secure_receiver):
    server = pki.server(pki.issue()) if secure_receiver else None
    client = None if secure_receiver else pki.caller()
    async with tls_pair(server, client) as pair:
        issued = pair.offer(recorder)
        lie = rerouted(issued, "tcp", tls="off" if secure_receiver else "on")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TransferError):
                await pair.open(lie)
        said = "no TLS with the peer" if secure_receiver else "the peer speaks TLS"
        await until(lambda: said in logged(caplog))
        assert recorder.calls == []


@pytest.mark.parametrize("host", ["", ".example", "a" * 70])
async def test_an_endpoint_whose_host_is_none_is_refused(pki, recorder, host):
    async with tls_pair(pki.server(pki.issue()), pki.caller()) as pair:
        with pytest.raises(TransferError):
            await pair.open(rerouted(pair.offer(recorder), "tcp", host=host))


async def test_garbage_on_a_tls_port_ends_its_own_connection_only(pki, recorder):
    async with tls_pair(pki.server(pki.issue()), pki.caller()) as pair:
        issued = pair.offer(recorder)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" + bytes(600), b"\x00", b"TKV\n" * 100):
            async with raw_connection(issued) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, garbage)
        await push_and_commit(await pair.open(issued))


@asynccontextmanager
async def raw_connection(issued):
    fields = Endpoint.decode(issued.endpoint).reach["tcp"]
    sock = await tcp.dial(fields["host"], int(fields["port"]))
    try:
        yield sock
    finally:
        sock.close()


@pytest.mark.parametrize("secured", [True, False])
async def test_a_peer_that_drips_bytes_is_cut_off_in_time(pki, recorder, secured):
    """Each byte would renew the patience for the next; the handshake as a whole has a deadline."""
    server = pki.server(pki.issue()) if secured else None
    async with tls_pair(server, None) as pair, raw_connection(pair.offer(recorder)) as sock:
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


async def test_only_so_many_may_shake_hands_at_a_time(pki, recorder, monkeypatch):
    monkeypatch.setattr(receiver_module, "MAX_HANDSHAKES", 2)
    slow = dataclasses.replace(QUICK, lease_s=PATIENCE_S)
    async with tls_pair(pki.server(pki.issue()), pki.caller(), timing=slow) as pair:
        loop = asyncio.get_running_loop()
        issued = pair.offer(recorder)
        async with raw_connection(issued), raw_connection(issued), raw_connection(issued) as third:
            async with asyncio.timeout(slow.lease_s / 2):
                assert await loop.sock_recv(third, 1) == b""
        assert await opens_in_the_end(pair, issued)


async def opens_in_the_end(pair, issued):
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await (await pair.open(issued)).abort()
                return True
            except TransferError:  # the receiver has yet to notice who left
                await asyncio.sleep(0.01)


async def test_a_new_certificate_is_shown_to_new_senders_and_open_hand_offs_go_on(pki, stranger):
    shown = pki.issue()
    async with tls_pair(pki.server(shown), pki.caller()) as pair:
        running = Recorder()
        handoff = await pair.begin(running)
        await handoff.push(0, SOURCES[:1])
        shown.show(stranger.issue())
        newcomer = KvSender(SharedPool().memory, PRINTS, ManualClock(), "tcp", tls=stranger.caller(), timing=QUICK)
        offer = pair.offer(Recorder(), (7, 8, 9))
        await push_and_commit(await newcomer.open(offer.ticket, offer.endpoint, PATIENCE_S))
        await newcomer.stop()
        await handoff.push(1, SOURCES[1:])
        await handoff.commit(b"")
        assert running.calls == RECEIVED
        assert pair.landed()
