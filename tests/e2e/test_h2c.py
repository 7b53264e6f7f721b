"""vLLM's gRPC engine protocol by plain HTTP/2 with prior knowledge (h2c), frame by frame, without any gRPC library.

So it comes from Envoy behind an endpoint picker such as llm-d's, which reads and forwards what callers send: other
headers around it, a message cut at any byte, an answer of which every frame and trailer is read.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from smg_grpc_proto import vllm_engine_pb2 as engine

from bench.support.cluster import Cluster, becomes_idle
from tandem.client import Client

SERVICE = "/vllm.grpc.engine.VllmEngine"
FROM_THE_PICKER = (
    ("x-gateway-destination-endpoint", "10.0.0.7:50051"),
    ("x-gateway-inference-objective", "chat"),
    ("x-forwarded-proto", "http"),
    ("x-request-id", "0b7a4a9c-6f5e-4a54-9d0e-6f7a2e1d1c55"),
    ("x-envoy-expected-rq-timeout-ms", "15000"),
)
CUT_BYTES = 7
PATIENCE_S = 30.0
PREFIX = struct.Struct(">BI")
"""Of each message: whether it is compressed, and its length."""


@dataclass(slots=True)
class Answer:
    """What came back on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False

    def messages(self, kind: Any) -> list[Any]:
        """All of the body."""
        found, place = [], 0
        while place < len(self.body):
            compressed, length = PREFIX.unpack_from(self.body, place)
            assert not compressed
            place += PREFIX.size
            found.append(kind.FromString(self.body[place : place + length]))
            place += length
        return found


class Wire:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._http2.initiate_connection()  # the preface at once: nothing is negotiated
        self._answers: dict[int, Answer] = {}
        self._flush()

    def send(self, method: str, message: bytes, headers: Sequence[tuple[str, str]] = ()) -> int:
        """Begins a call, its message cut into small frames; returns the stream."""
        stream = self._http2.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":path", f"{SERVICE}/{method}"), (":authority", "pool")]
        grpc = [("content-type", "application/grpc"), ("te", "trailers"), ("grpc-timeout", "20S")]
        self._http2.send_headers(stream, [*head, *grpc, *headers])
        body = PREFIX.pack(0, len(message)) + message
        for place in range(0, len(body), CUT_BYTES):
            last = place + CUT_BYTES >= len(body)
            self._http2.send_data(stream, body[place : place + CUT_BYTES], end_stream=last)
            self._flush()
        self._answers[stream] = Answer()
        return stream

    def cancel(self, stream: int) -> None:
        """As a proxy does whose caller has left."""
        self._http2.reset_stream(stream, error_code=8)
        self._flush()

    def read(self, stream: int, until_bytes: int | None = None) -> Answer:
        """Until its end, or until so much of its body is there."""
        answer = self._answers[stream]
        while not answer.ended and (until_bytes is None or len(answer.body) < until_bytes):
            received = self._sock.recv(65536)
            assert received, "the server hung up"
            for event in self._http2.receive_data(received):
                self._heed(event)
            self._flush()
        return answer

    def _heed(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                self._answers[event.stream_id].headers = dict(event.headers)
                if event.stream_ended:  # trailers only
                    self._answers[event.stream_id].trailers = dict(event.headers)
            case h2.events.TrailersReceived():
                self._answers[event.stream_id].trailers = dict(event.headers)
            case h2.events.DataReceived():
                self._answers[event.stream_id].body += event.data
                self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self._answers[event.stream_id].ended = True

    def _flush(self) -> None:
        self._sock.sendall(self._http2.data_to_send())


@contextmanager
def connected(target: str) -> Iterator[Wire]:
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock:
        yield Wire(sock)


@pytest.fixture
def wire(demo_cluster: Cluster, client: Client) -> Iterator[Wire]:
    """`client` sees to it that nothing runs afterwards."""
    with connected(demo_cluster.target) as wire:
        yield wire


def asked(**sampling: Any) -> bytes:
    params = engine.SamplingParams(temperature=0.0, **sampling)
    request = engine.GenerateRequest(request_id="one", text="Once upon a time", stream=True, sampling_params=params)
    return bytes(request.SerializeToString())


def test_a_stream_comes_whole_with_its_trailers(wire: Wire, client: Client) -> None:
    expected = client.complete("Once upon a time", max_tokens=24, temperature=0.0).choices[0]

    answer = wire.read(wire.send("Generate", asked(max_tokens=24), FROM_THE_PICKER))

    assert answer.headers[":status"] == "200"
    assert answer.headers["content-type"].startswith("application/grpc")
    assert "grpc-status" not in answer.headers  # a trailer, behind the messages
    assert answer.trailers["grpc-status"] == "0"
    *chunks, last = answer.messages(engine.GenerateResponse)
    assert tuple(token for each in chunks for token in each.chunk.token_ids) == expected.token_ids
    assert tuple(last.complete.output_ids) == expected.token_ids
    assert last.complete.finish_reason == expected.finish_reason.value


def test_calls_of_one_message_and_streams_share_a_connection(wire: Wire) -> None:
    streams = [wire.send("Generate", asked(max_tokens=8)) for _ in range(3)]
    model = wire.send("GetModelInfo", b"")

    (info,) = wire.read(model).messages(engine.GetModelInfoResponse)

    assert info.served_model_name == "demo"
    # How many tokens a message holds depends on the time; the last one has all.
    completions = [wire.read(stream).messages(engine.GenerateResponse)[-1].complete.output_ids for stream in streams]
    assert len({tuple(token_ids) for token_ids in completions}) == 1
    assert completions[0]
    assert {wire.read(stream).trailers["grpc-status"] for stream in (*streams, model)} == {"0"}


@pytest.mark.parametrize(
    ("method", "sampling", "status", "words"),
    [("Generate", {"max_tokens": 4, "top_p": 7.0}, "3", "top_p"), ("NoSuchMethod", {}, "12", "")],
)
def test_a_refusal_is_a_status_in_the_trailers(
    wire: Wire, method: str, sampling: dict[str, Any], status: str, words: str
) -> None:
    answer = wire.read(wire.send(method, asked(**sampling)))

    assert answer.headers[":status"] == "200"
    assert answer.body == b""
    assert answer.trailers["grpc-status"] == status
    assert words in answer.trailers["grpc-message"]


def test_a_stream_that_is_reset_ends_its_request(wire: Wire, client: Client) -> None:
    stream = wire.send("Generate", asked(max_tokens=800, ignore_eos=True))
    wire.read(stream, until_bytes=64)

    wire.cancel(stream)

    # At once: while nobody reads, nobody answers the server's pings either.
    assert wire.read(wire.send("HealthCheck", b"")).trailers["grpc-status"] == "0"
    assert becomes_idle(client), client.status()
