"""Peers that lie: every byte they send is judged, and nothing of it is ever attached."""

import dataclasses
import secrets

import pytest
import xxhash

from kvtransfer.base import BlockRefs, Fingerprints
from kvtransfer.endpoint import Endpoint
from kvtransfer.frame import FrameType
from kvtransfer.handshake import Hello, fingerprint_fields
from kvtransfer.messages import Commit, Write, decode_error, digest_of
from kvtransfer.sender import KvSender
from kvtransfer.ticket import Ticket
from kvtransfer.transports import tcp
from tandem.errors import ChecksumMismatch, HandshakeMismatch, PeerLost, TicketRefused, TransferError
from tandem.kv_layout import DType, KvLayout
from tests.kv_ends import FAILED, RECEIVED, Recorder, logged, paired, push_and_commit, until
from tests.manual_clock import ManualClock
from tests.raw_sender import raw
from tests.transports import EVERY, PRINTS, WAYS

BLOCK_BYTES = 256
BLOCK = bytes(range(256))
SUM = xxhash.xxh3_64_intdigest(BLOCK)


def _altered(offer, **changes):
    return dataclasses.replace(offer, ticket=dataclasses.replace(Ticket.decode(offer.ticket), **changes).encode())


def _with_first(blocks, **changes):
    return BlockRefs.of([dataclasses.replace(blocks[0], **changes), *blocks[1:]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {"nonce": secrets.token_bytes(16)}, "wrong nonce"),
        (lambda t: {"number": t.number ^ 1}, "unknown"),
        (lambda t: {"blocks": _with_first(t.blocks, generation=99)}, "other blocks or generations"),
        (lambda t: {"blocks": t.blocks[:2]}, "other blocks or generations"),
        (lambda t: {"blocks": _with_first(t.blocks, block_id=9)}, "other blocks"),
        (lambda t: {"blocks": _with_first(t.blocks, block_id=16)}, "leaves the peer's"),
        (lambda t: {"expires_in_ms": 2**31}, "altered"),
        (lambda t: {"first_block": 1}, "other blocks"),
        (lambda t: {"incarnation": "cd" * 16}, "another incarnation"),
        (lambda t: {"layout_fingerprint": "cd" * 16}, "another layout"),
    ],
)
@pytest.mark.parametrize("transport", EVERY)
async def test_a_forged_ticket_is_refused_and_the_true_one_still_works(recorder, change, said, transport):
    async with paired(transport) as pair:
        offer = pair.offer(recorder)
        with pytest.raises(TicketRefused, match=said):
            await pair.open(_altered(offer, **change(Ticket.decode(offer.ticket))))
        assert recorder.calls == []
        await push_and_commit(await pair.open(offer))
        assert recorder.calls == RECEIVED


@pytest.mark.parametrize("data", [b"", b"\1", b"\3" + bytes(100), bytes(69), b"\2" + bytes(68), b"\2" * 400])
async def test_bytes_that_are_no_ticket_are_refused(recorder, data):
    async with paired("tcp") as pair:
        offer = pair.offer(recorder)
        with pytest.raises(TicketRefused):
            await pair.sender.open(data, offer.endpoint, 5.0)
        async with raw(offer, "tcp") as peer:
            answer = await peer.ask(FrameType.OPEN, int(offer.transfer_id, 16), data)
            assert answer.type is FrameType.REFUSED
        assert recorder.calls == []


@pytest.mark.parametrize("transport", EVERY)
async def test_a_replayed_ticket_is_refused_in_every_state(recorder, transport):
    async with paired(transport) as pair:
        offer = pair.offer(recorder)
        handoff = await pair.open(offer)
        async with raw(offer, transport) as thief:
            number = int(offer.transfer_id, 16)
            answer = await thief.ask(FrameType.OPEN, number, offer.ticket)
            assert (answer.type, "shown before" in decode_error(answer.payload).message) == (FrameType.REFUSED, True)
            thief.say(FrameType.ABORT, number)
            assert (await thief.hear()).type is FrameType.DRAINED
            commit = Commit(0, 0, b"").encode()
            assert (await thief.ask(FrameType.COMMIT, number, commit)).type is FrameType.FAILED
        await push_and_commit(handoff)
        with pytest.raises(TicketRefused, match="unknown or has ended"):
            await pair.open(offer)
        assert recorder.calls == RECEIVED


async def test_a_stranger_cannot_write_into_another_connections_transfer(recorder):
    async with paired("tcp") as pair:
        offer = pair.offer(recorder)
        handoff = await pair.open(offer)
        async with raw(offer, "tcp") as stranger:
            number = int(offer.transfer_id, 16)
            stranger.say(FrameType.WRITE, number, Write(0, (SUM,)).encode(), inline=BLOCK)
            assert (await stranger.ask(FrameType.ABORT, 1)).type is FrameType.DRAINED
        await push_and_commit(handoff)
        assert pair.landed()


@pytest.mark.parametrize("transport", EVERY)
async def test_an_expired_ticket_is_refused_before_any_reaper_runs(recorder, transport):
    async with paired(transport) as pair:
        offer = pair.offer(recorder, expires_in_s=1.0)
        pair.clock.advance_s(1.5)
        with pytest.raises(TicketRefused, match="expired"):
            await pair.open(offer)
        assert recorder.calls == ["failed", "writer_stopped"]


@pytest.mark.parametrize("transport", EVERY)
async def test_a_ticket_of_a_former_life_is_refused(transport):
    async with paired(transport) as former, paired(transport) as current:
        stale, fresh = former.offer(Recorder()), current.offer(Recorder())
        with pytest.raises(TicketRefused, match="another incarnation"):
            await current.sender.open(stale.ticket, fresh.endpoint, 5.0)


@pytest.mark.parametrize("transport", EVERY)
async def test_an_address_that_a_new_life_took_over_is_refused(transport):
    async with paired(transport) as former, paired(transport) as current:
        stale, fresh = former.offer(Recorder()), current.offer(Recorder())
        moved = dataclasses.replace(Endpoint.decode(stale.endpoint), reach=Endpoint.decode(fresh.endpoint).reach)
        with pytest.raises(TicketRefused, match="now belongs to incarnation"):
            await former.sender.open(stale.ticket, moved.encode(), 5.0)


@pytest.mark.parametrize("transport", EVERY)
async def test_bytes_that_differ_from_their_checksum_fail_the_handoff(recorder, transport):
    async with paired(transport) as pair:
        offer = pair.offer(recorder, (3,))
        async with raw(offer, transport) as peer:
            number = await peer.open(offer)
            announced = await peer.put(number, 3, BLOCK, spoil=True)
            answer = await peer.hear()
            assert answer.type is FrameType.WITHDRAWN
            assert isinstance(decode_error(answer.payload), ChecksumMismatch)
            assert ("writer_stopped" in recorder.calls) is not WAYS[transport].peer_writes
            commit = Commit(1, digest_of([announced]), b"").encode()
            assert (await peer.ask(FrameType.COMMIT, number, commit)).type is FrameType.FAILED
            peer.say(FrameType.DRAINED, number)
            await recorder.until("writer_stopped")
        assert isinstance(recorder.error, ChecksumMismatch)
        assert recorder.calls == FAILED


@pytest.mark.parametrize(
    ("first_block", "seq", "write", "said"),
    [
        (0, 1, Write(0, (SUM,)), "came where 0 was due"),
        (0, 0, Write(3, (SUM,)), "leaves the offer of 0:3"),
        (0, 0, Write(2, (SUM, SUM)), "leaves the offer of 0:3"),
        (0, 0, Write(2**32 - 1, (SUM,)), "leaves the offer of 0:3"),
        (2, 0, Write(0, (SUM,)), "leaves the offer of 2:5"),
        (2, 0, Write(1, (SUM, SUM)), "leaves the offer of 2:5"),
        (2, 0, Write(4, (SUM, SUM)), "leaves the offer of 2:5"),
        (2, 0, Write(5, (SUM,)), "leaves the offer of 2:5"),
        (2, 0, Write(2**32 - 1, (SUM,)), "leaves the offer of 2:5"),
    ],
)
async def test_a_write_out_of_order_or_range_fails_the_handoff(recorder, first_block, seq, write, said):
    async with paired("tcp") as pair:
        offer = pair.offer(recorder, first_block=first_block)
        before = pair.target.blocks.clone()
        async with raw(offer, "tcp") as peer:
            number = await peer.open(offer)
            inline = BLOCK * len(write.checksums)
            answer = await peer.ask(FrameType.WRITE, number, write.encode(), seq, inline)
            assert said in decode_error(answer.payload).message
        assert recorder.calls == FAILED
        assert (pair.target.blocks == before).all()


async def test_a_block_written_twice_fails_the_handoff(recorder):
    async with paired("tcp") as pair:
        offer = pair.offer(recorder)
        async with raw(offer, "tcp") as peer:
            number = await peer.open(offer)
            first = await peer.ask(FrameType.WRITE, number, Write(0, (SUM,)).encode(), 0, BLOCK)
            assert first.type is FrameType.WRITE_OK
            second = await peer.ask(FrameType.WRITE, number, Write(0, (SUM,)).encode(), 1, BLOCK)
            assert "repeats a block" in decode_error(second.payload).message


@pytest.mark.parametrize(
    ("num_writes", "commit", "said"),
    [
        (0, Commit(0, digest_of(()), b""), "COMMIT after 0 of 1 blocks"),
        (1, Commit(2, digest_of([SUM]), b""), "counts 2 writes"),
        (1, Commit(1, digest_of([SUM]) ^ 1, b""), "digest"),
    ],
)
async def test_a_commit_that_does_not_add_up_fails_the_handoff(recorder, num_writes, commit, said):
    async with paired("tcp") as pair:
        offer = pair.offer(recorder, (3,), first_block=7)
        async with raw(offer, "tcp") as peer:
            number = await peer.open(offer)
            for _ in range(num_writes):
                await peer.ask(FrameType.WRITE, number, Write(7, (SUM,)).encode(), 0, BLOCK)
            answer = await peer.ask(FrameType.COMMIT, number, commit.encode())
            assert answer.type is FrameType.FAILED
            assert said in decode_error(answer.payload).message
        assert recorder.calls == FAILED


async def test_a_second_commit_changes_nothing(recorder):
    async with paired("tcp") as pair:
        offer = pair.offer(recorder, (3,))
        async with raw(offer, "tcp") as peer:
            number = await peer.open(offer)
            await peer.ask(FrameType.WRITE, number, Write(0, (SUM,)).encode(), 0, BLOCK)
            commit = Commit(1, digest_of([SUM]), b"x").encode()
            assert (await peer.ask(FrameType.COMMIT, number, commit)).type is FrameType.COMMITTED
            assert (await peer.ask(FrameType.COMMIT, number, commit)).type is FrameType.FAILED
            peer.say(FrameType.ABORT, number)
            assert (await peer.hear()).type is FrameType.DRAINED
        assert recorder.calls == RECEIVED


async def test_withdrawing_in_the_middle_of_a_block_frees_it_only_when_reading_has_stopped(recorder):
    async with paired("tcp") as pair:
        offer = pair.offer(recorder, (3,))
        async with raw(offer, "tcp") as peer:
            number = await peer.open(offer)
            half = BLOCK_BYTES // 2
            pair.target.blocks[3].zero_()
            peer.say(FrameType.WRITE, number, Write(0, (SUM,)).encode(), 0, BLOCK[:half])
            await until(lambda: int(pair.target.blocks[3, half - 1]) == half - 1)
            pair.receiver.withdraw(offer.transfer_id)
            assert recorder.calls == FAILED[:2]
            assert (await peer.hear()).type is FrameType.WITHDRAWN
            await peer.connection._loop.sock_sendall(peer.connection.sock, BLOCK[half:])
            await recorder.until("writer_stopped")
            assert (await peer.ask(FrameType.ABORT, number)).type is FrameType.DRAINED
        assert pair.receiver.num_live == 0


@pytest.mark.parametrize("transport", EVERY)
@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (Fingerprints("model-b", KvLayout(2, 1, 4, 8, DType.BFLOAT16)), "model"),
        (Fingerprints("model-a", KvLayout(1, 2, 4, 8, DType.BFLOAT16)), "num_layers"),
        (Fingerprints("model-a", KvLayout(2, 1, 8, 4, DType.BFLOAT16)), "block_size"),
        (Fingerprints("model-a", KvLayout(2, 1, 4, 8, DType.FLOAT16)), "dtype"),
    ],
)
async def test_both_sides_name_the_field_that_differs(recorder, caplog, transport, theirs, field):
    async with paired(transport) as pair:
        sender = KvSender(pair.source.memory, theirs, ManualClock(), transport)
        offer = pair.offer(recorder)
        with pytest.raises(HandshakeMismatch, match=f"{field} differs"):
            await sender.open(offer.ticket, offer.endpoint, 5.0)
        await sender.stop()
        assert f"{field} differs" in logged(caplog)
        assert recorder.calls == []


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ((*fingerprint_fields(PRINTS), ("rope", "new")), "rope differs: ours absent, theirs new"),
        ((("model", "x" * 10_000),), "model differs"),
    ],
    ids=["a field that only one side knows", "one too long for the log"],
)
async def test_a_receiver_says_what_differs_in_few_words(recorder, caplog, theirs, said):
    async with paired("tcp") as pair:
        hello = Hello("ab" * 16, "tcp", 16, ("xxh3-64",), theirs)
        async with raw(pair.offer(recorder), "tcp", hello) as peer:
            with pytest.raises(PeerLost):
                await peer.hear()
        assert said in logged(caplog)
        assert len(logged(caplog)) < 1000


async def test_bytes_that_are_no_frame_end_the_connection_only(recorder):
    async with paired("tcp") as pair:
        offer = pair.offer(recorder)
        fields = Endpoint.decode(offer.endpoint).reach["tcp"]
        sock = await tcp.dial(fields["host"], int(fields["port"]))
        sock.setblocking(True)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: somebody else\r\n\r\n")
        sock.close()
        await push_and_commit(await pair.open(offer))
        assert recorder.calls == RECEIVED


async def test_garbage_on_an_open_transfer_fails_it(recorder):
    async with paired("tcp") as pair:
        offer = pair.offer(recorder)
        async with raw(offer, "tcp") as peer:
            await peer.open(offer)
            await peer.connection._loop.sock_sendall(peer.connection.sock, bytes(64))
            await recorder.until("writer_stopped")
        assert isinstance(recorder.error, TransferError)
