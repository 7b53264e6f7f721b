"""Frames, messages, tickets, endpoints: what is written is read back, and nothing else is accepted."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.base import BlockRef, BlockRefs
from kvtransfer.endpoint import Endpoint
from kvtransfer.fields import decode_fields, encode_fields
from kvtransfer.frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, PROTOCOL_VERSION, Frame, FrameType, Header
from kvtransfer.handshake import Hello
from kvtransfer.messages import (
    Commit,
    Write,
    decode_error,
    decode_window,
    encode_error,
)
from kvtransfer.ticket import Ticket, check_shown
from tandem.errors import ChecksumMismatch, FrameError, HandshakeMismatch, TicketRefused, TransferError

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
HEX16 = st.binary(min_size=16, max_size=16).map(bytes.hex)
FRAMES = st.sampled_from(FrameType).flatmap(
    lambda kind: st.builds(Frame, st.just(kind), U64, U32, st.binary(max_size=min(300, MAX_PAYLOAD_BYTES[kind])))
)
TICKETS = st.builds(
    Ticket,
    number=st.integers(1, 2**63 - 1),
    incarnation=HEX16,
    nonce=st.binary(min_size=16, max_size=16),
    layout_fingerprint=HEX16,
    expires_in_ms=U32,
    first_block=st.integers(0, 1000),
    blocks=st.lists(st.builds(BlockRef, U32, U64), max_size=20).map(BlockRefs.of),
).filter(lambda ticket: ticket.end > 0)


def decode(data):
    """Exactly one frame."""
    return Header.decode(data[:HEADER_BYTES]).complete(data[HEADER_BYTES:])


@given(FRAMES)
def test_a_frame_reads_back_as_it_was_written(frame):
    assert decode(frame.encode()) == frame


@given(FRAMES, st.data())
def test_a_truncated_frame_is_refused(frame, data):
    encoded = frame.encode()
    with pytest.raises(FrameError):
        decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@given(FRAMES, st.data())
def test_a_frame_with_any_bit_flipped_is_refused(frame, data):
    encoded = bytearray(frame.encode())
    bit = data.draw(st.integers(0, len(encoded) * 8 - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    in_version = bit // 8 == 4
    with pytest.raises(HandshakeMismatch if in_version else FrameError):
        decode(bytes(encoded))


@given(st.binary(max_size=200))
def test_random_bytes_never_pass_for_a_frame(data):
    with pytest.raises((FrameError, HandshakeMismatch)):
        decode(data)


@pytest.mark.parametrize("kind", FrameType)
def test_a_length_over_the_types_limit_is_refused_before_its_payload_is_read(kind):
    header = bytearray(Frame(kind).encode()[:HEADER_BYTES])
    header[8:12] = (MAX_PAYLOAD_BYTES[kind] + 1).to_bytes(4, "little")
    with pytest.raises(FrameError, match="exceeds"):
        Header.decode(header)
    with pytest.raises(FrameError, match="exceeds"):
        Frame(kind, payload=bytes(MAX_PAYLOAD_BYTES[kind] + 1)).encode()


def test_another_protocol_version_is_named():
    encoded = bytearray(Frame(FrameType.HELLO).encode())
    encoded[4] = PROTOCOL_VERSION + 1
    with pytest.raises(HandshakeMismatch, match="protocol_version differs: ours 2, theirs 3"):
        decode(bytes(encoded))


@given(st.builds(Write, U32, st.lists(U64, min_size=1, max_size=50).map(tuple)))
def test_a_write_reads_back(write):
    assert Write.decode(write.encode()) == write


@given(st.builds(Commit, U32, U64, st.binary(max_size=100)))
def test_a_commit_reads_back(commit):
    assert Commit.decode(commit.encode()) == commit


@pytest.mark.parametrize("reader", [Write.decode, decode_window, decode_fields, Hello.decode, Endpoint.decode])
@given(data=st.binary(max_size=120))
def test_random_payloads_are_read_or_refused_but_never_crash(reader, data):
    with contextlib.suppress(FrameError):
        reader(data)


@given(TICKETS)
def test_a_ticket_reads_back(ticket):
    assert Ticket.decode(ticket.encode()) == ticket
    check_shown(ticket.encode(), ticket)


@given(TICKETS, st.data())
def test_a_ticket_with_any_bit_flipped_is_refused(ticket, data):
    encoded = bytearray(ticket.encode())
    bit = data.draw(st.integers(0, len(encoded) * 8 - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TicketRefused):
        check_shown(bytes(encoded), ticket)


@given(st.binary(max_size=300))
def test_random_bytes_never_pass_for_a_ticket(data):
    with pytest.raises(TicketRefused):
        check_shown(data, Ticket(1, "00" * 16, bytes(16), "00" * 16, 0, 0, BlockRefs.of([BlockRef(0, 0)])))


@given(st.dictionaries(st.text("abc.", min_size=1), st.text().filter(lambda text: "\n" not in text), max_size=9))
def test_fields_read_back(fields):
    assert decode_fields(encode_fields(fields)) == fields


@pytest.mark.parametrize("data", [b"=x", b"name", b"a=1\na=2", b"a=\xff", b"a=1\n\nb=2", b"a=" + b"x" * 20000])
def test_bad_fields_are_refused(data):
    with pytest.raises(FrameError):
        decode_fields(data)


def test_fields_that_could_not_be_read_back_are_not_written():
    for fields in ({"": "x"}, {"a=b": "x"}, {"a": "x\ny"}, {"a": "x" * 20000}):
        with pytest.raises(FrameError):
            encode_fields(fields)


def test_an_endpoint_reads_back_and_names_its_version():
    endpoint = Endpoint("ab" * 16, {"shm": {"unix_name": "name", "uid": "0"}, "rdma-2": {}, "tcp": {"host": "::1"}})
    assert Endpoint.decode(endpoint.encode()) == endpoint
    assert list(Endpoint.decode(endpoint.encode()).reach) == ["shm", "rdma-2", "tcp"]
    with pytest.raises(FrameError, match="version 9"):
        Endpoint.decode(endpoint.encode().replace(b"endpoint_version=3", b"endpoint_version=9"))


def test_an_endpoint_replaces_an_earlier_life_at_the_same_place_only():
    old = Endpoint("ab" * 16, {"shm": {"unix_name": "old"}, "tcp": {"host": "a", "port": "1"}, "bare": {}})
    at_its_place = Endpoint("cd" * 16, {"tcp": {"host": "a", "port": "1"}})
    elsewhere = Endpoint("cd" * 16, {"shm": {"unix_name": "new"}, "tcp": {"host": "a", "port": "2"}, "bare": {}})
    assert at_its_place.replaces(old)
    assert not elsewhere.replaces(old)
    assert not old.replaces(old)


@given(st.lists(st.text("abc-", min_size=1), unique=True), st.dictionaries(st.text("xyz", min_size=1), st.text("0=.")))
def test_a_hello_reads_back(verify, details):
    hello = Hello("ab" * 16, "tcp", 7, tuple(verify), (("model", "m"), ("dtype", "d")), details)
    assert Hello.decode(hello.encode()) == hello


def test_a_hello_of_a_pool_without_blocks_is_refused():
    with pytest.raises(FrameError, match="no blocks"):
        Hello.decode(Hello("ab" * 16, "shm", 0, (), ()).encode())


def test_errors_keep_their_class_across_the_wire():
    assert isinstance(decode_error(encode_error(ChecksumMismatch("block 3"))), ChecksumMismatch)
    unknown = decode_error(b"NEW_REASON\n" + b"\xff" * 9000)
    assert type(unknown) is TransferError
    assert len(unknown.message) < 5000
