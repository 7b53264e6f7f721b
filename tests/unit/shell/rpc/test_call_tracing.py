"""Spans of calls: their parent, their attributes, and what is said of each way to end."""

# ruff: noqa: N802  (the names are gRPC's)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind

from shell.rpc.server import RpcServer, Service
from shell.telemetry.trace_context import trace_in
from tandem.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, TandemError
from tandem.rpc.channel import open_channel
from tandem.v1 import inference_pb2, inference_pb2_grpc, registry_pb2_grpc
from tests.recorded_spans import RecordedSpans

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
GENERATE, GET_MODEL = "tandem.v1.InferenceService/Generate", "tandem.v1.InferenceService/GetModel"
PROBE = "tandem.v1.InferenceService/Detokenize"
WAIT_S = 20.0


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.waiting = asyncio.Event()
        self.ended = asyncio.Event()
        self.traceparent: str | None = None

    async def GetModel(self, request: Any, context: Any) -> inference_pb2.GetModelResponse:
        self.traceparent = (trace_in() or (None,))[0]
        if self.error is not None:
            raise self.error
        return inference_pb2.GetModelResponse(model="demo")

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse()

    async def Generate(self, request: Any, context: Any) -> None:
        await context.write(inference_pb2.GenerateResponse(text="a"))
        try:
            if request.text == "wait":
                self.waiting.set()
                await asyncio.Event().wait()
        finally:
            self.ended.set()


class Bench:
    """A traced server and a caller."""

    def __init__(self, channel: grpc.aio.Channel, servicer: Servicer, recorded: RecordedSpans) -> None:
        self.channel = channel
        self.servicer = servicer
        self.recorded = recorded
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

    async def ended(self, name: str) -> None:
        """A span ends after its call's status has left."""
        async with asyncio.timeout(WAIT_S):
            while name not in self.recorded.names:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench(recorded: RecordedSpans) -> AsyncIterator[Bench]:
    servicer = Servicer()
    services = [
        Service(
            "tandem.v1.InferenceService",
            lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server),
            probes=("Detokenize",),
        ),
        Service(
            "tandem.v1.RegistryService",
            lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(
                registry_pb2_grpc.RegistryServiceServicer(), server
            ),
            long_lived=True,
        ),
    ]
    async with AsyncExitStack() as stack:
        server = RpcServer("127.0.0.1:0", services, announce_s=0, tracer=recorded.tracer)
        channel = open_channel(f"127.0.0.1:{await server.start()}")
        stack.push_async_callback(server.drain, 0)
        stack.push_async_callback(channel.close)
        yield Bench(channel, servicer, recorded)


async def test_a_call_is_a_server_span_below_the_callers(bench: Bench) -> None:
    await bench.stub.GetModel(inference_pb2.GetModelRequest(), metadata=(("traceparent", TRACEPARENT),))
    await bench.ended(GET_MODEL)
    span = bench.recorded.one(GET_MODEL)
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == ("a" * 32, "b" * 16)
    assert bench.recorded.attributes(GET_MODEL) == {
        "rpc.system": "grpc",
        "rpc.service": "tandem.v1.InferenceService",
        "rpc.method": "GetModel",
        "rpc.grpc.status_code": 0,
    }


async def test_the_handler_runs_within_the_span(bench: Bench) -> None:
    await bench.stub.GetModel(inference_pb2.GetModelRequest(), metadata=(("traceparent", TRACEPARENT),))
    await bench.ended(GET_MODEL)
    context = bench.recorded.one(GET_MODEL).context
    assert context is not None
    assert bench.servicer.traceparent == f"00-{'a' * 32}-{context.span_id:016x}-01"


@pytest.mark.parametrize("metadata", [(), (("traceparent", "nonsense"),), (("traceparent", ""),)])
async def test_a_call_without_a_trace_begins_one(bench: Bench, metadata: tuple[tuple[str, str], ...]) -> None:
    await bench.stub.GetModel(inference_pb2.GetModelRequest(), metadata=metadata)
    await bench.ended(GET_MODEL)
    assert bench.recorded.one(GET_MODEL).parent is None


@pytest.mark.parametrize(
    ("error", "code", "is_fault"),
    [
        (InvalidRequest("text", "a secret"), grpc.StatusCode.INVALID_ARGUMENT, False),
        (Overloaded("a secret"), grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        (DeadlineExceeded("a secret"), grpc.StatusCode.DEADLINE_EXCEEDED, True),
        (InternalError("a secret"), grpc.StatusCode.INTERNAL, True),
        (ValueError("a secret"), grpc.StatusCode.INTERNAL, True),
    ],
)
async def test_a_failed_call_has_its_code_and_is_an_error_where_the_server_is_at_fault(
    bench: Bench, error: TandemError, code: grpc.StatusCode, is_fault: bool
) -> None:
    bench.servicer.error = error
    with pytest.raises(grpc.aio.AioRpcError):
        await bench.stub.GetModel(inference_pb2.GetModelRequest())
    await bench.ended(GET_MODEL)
    span = bench.recorded.one(GET_MODEL)
    attributes = bench.recorded.attributes(GET_MODEL)
    assert (attributes["rpc.grpc.status_code"], attributes["error.type"]) == (code.value[0], code.name)
    assert span.status.status_code is (trace.StatusCode.ERROR if is_fault else trace.StatusCode.UNSET)
    assert "secret" not in span.to_json()


async def test_a_cancelled_stream_is_told_as_cancelled_and_never_as_ok(bench: Bench) -> None:
    call = bench.stub.Generate(inference_pb2.GenerateRequest(text="wait"))
    await bench.servicer.waiting.wait()
    call.cancel()
    await bench.ended(GENERATE)
    assert bench.recorded.attributes(GENERATE)["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]
    assert bench.recorded.attributes(GENERATE)["error.type"] == "CANCELLED"
    assert bench.recorded.one(GENERATE).status.status_code is not trace.StatusCode.OK


async def test_probes_streams_between_processes_and_unknown_methods_have_no_span(bench: Bench) -> None:
    await health_pb2_grpc.HealthStub(bench.channel).Check(health_pb2.HealthCheckRequest())
    register = registry_pb2_grpc.RegistryServiceStub(bench.channel).Register(iter(()))
    assert await register.code() is not grpc.StatusCode.OK  # it has no handler of its own here, and ends
    assert await bench.channel.unary_unary("/made.up/Name")(b"").code() is grpc.StatusCode.UNIMPLEMENTED
    await bench.stub.GetModel(inference_pb2.GetModelRequest())
    await bench.ended(GET_MODEL)
    assert bench.recorded.names == [GET_MODEL]


async def test_a_probe_begins_no_trace_and_has_a_span_in_one_that_its_caller_began(bench: Bench) -> None:
    await bench.stub.Detokenize(inference_pb2.DetokenizeRequest())
    await bench.stub.Detokenize(inference_pb2.DetokenizeRequest(), metadata=(("traceparent", TRACEPARENT),))
    await bench.ended(PROBE)
    assert bench.recorded.names == [PROBE]
    assert bench.recorded.one(PROBE).parent is not None


async def test_calls_of_one_connection_do_not_mix_their_spans(bench: Bench) -> None:
    def metadata(number: int) -> tuple[tuple[str, str], ...]:
        return (("traceparent", f"00-{number:032x}-{number:016x}-01"),)

    calls = [bench.stub.GetModel(inference_pb2.GetModelRequest(), metadata=metadata(n)) for n in range(1, 21)]
    await asyncio.gather(*calls)
    async with asyncio.timeout(WAIT_S):
        while len(bench.recorded.all) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    pairs = {(span.parent.trace_id, span.parent.span_id) for span in bench.recorded.all if span.parent is not None}
    assert pairs == {(number, number) for number in range(1, 21)}
