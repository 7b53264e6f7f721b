"""One trace per call through three real processes, at a collector that lives, is dead, or hangs."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from bench.support.cluster import Cluster, eventually, serve
from tandem.client import Client
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.collector import CollectedSpan, Collector

PROMPT = "the unmistakable zanzibar phrase"
WORK = ("queue", "prefill", "kv.transfer", "decode")
STOP_S = 8.0
"""An orderly end of three processes, two of them after the router: twice two seconds for spans, and the drain."""
TOKENS = 200
"""So many that the word of the hand-off comes before the last of them."""
ONE_OF_EACH = ("--prefill", "1", "--decode", "1", "--no-prefix-cache")
"""The prompt comes again: known to the decode worker, it would not go through both."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    with collector.serve() as endpoint, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
        environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Cluster]:
    with serve("demo", *ONE_OF_EACH) as cluster:
        yield cluster


@pytest.fixture
def client(traced: Cluster) -> Iterator[Client]:
    with Client(traced.target) as client:
        client.wait_ready(timeout_s=30)
        yield client


@pytest.fixture
def caller() -> Iterator[tuple[str, str]]:
    """Makes a span of the caller's own the current one; its trace id and span id."""
    provider = TracerProvider(shutdown_on_exit=False)
    with provider.get_tracer("caller").start_as_current_span("caller") as span:
        context = span.get_span_context()
        yield f"{context.trace_id:032x}", f"{context.span_id:016x}"
    provider.shutdown()


def trace_of(
    collector: Collector, trace_id: str, complete: Callable[[dict[str, CollectedSpan]], bool]
) -> dict[tuple[str, str], CollectedSpan]:
    """Spans of one trace by service and name, once those that are waited for have come."""

    def found() -> list[CollectedSpan]:
        return [span for span in collector.spans if span.trace_id == trace_id]

    assert eventually(lambda: complete({span.name: span for span in found()}), 10), [span.name for span in found()]
    return {(span.service.removeprefix("tandem-"), span.name): span for span in found()}


def has(*names: str) -> Callable[[dict[str, CollectedSpan]], bool]:
    return lambda spans: set(names) <= set(spans)


def test_one_trace_leads_from_the_caller_to_both_workers(
    client: Client, collector: Collector, caller: tuple[str, str]
) -> None:
    client.complete(PROMPT, max_tokens=20, ignore_eos=True, request_id="traced-1")
    rpc = "tandem.v1.InferenceService/Complete"
    spans = trace_of(collector, caller[0], has(rpc, "generate", *WORK, "kv.receive"))
    call, generate = spans["router", rpc], spans["router", "generate"]
    assert call.parent_id == caller[1]
    assert generate.parent_id == call.span_id
    below = {key for key, span in spans.items() if span.parent_id == generate.span_id}
    assert below == {
        ("router", "queue"),
        ("prefill", "queue"),
        ("prefill", "prefill"),
        ("prefill", "kv.transfer"),
        ("decode", "queue"),
        ("decode", "kv.receive"),
        ("decode", "decode"),
    }
    assert set(spans) == below | {("router", rpc), ("router", "generate")}


def test_spans_say_what_the_conventions_ask_for(client: Client, collector: Collector, caller: tuple[str, str]) -> None:
    done = client.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True, request_id="traced-2")
    spans = trace_of(collector, caller[0], has("tandem.v1.InferenceService/Complete", *WORK))
    call, generate = spans["router", "tandem.v1.InferenceService/Complete"], spans["router", "generate"]
    assert call.kind == "SERVER"
    assert call.attributes == {
        "rpc.system": "grpc",
        "rpc.service": "tandem.v1.InferenceService",
        "rpc.method": "Complete",
        "rpc.grpc.status_code": 0,
    }
    assert generate.attributes["gen_ai.operation.name"] == "text_completion"
    assert generate.attributes["gen_ai.request.model"] == "demo"
    assert generate.attributes["gen_ai.request.max_tokens"] == TOKENS
    assert generate.attributes["gen_ai.usage.input_tokens"] == done.usage.prompt_tokens
    assert generate.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert generate.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert generate.attributes["gen_ai.request.seed"] >= 0
    assert generate.attributes["gen_ai.response.id"] == generate.attributes["tandem.request_id"] == "traced-2"
    assert generate.events["placed"] == {
        "tandem.prefill.worker_id": "prefill-0",
        "tandem.decode.worker_id": "decode-0",
    }
    assert "first_token" in generate.events
    transfer = spans["prefill", "kv.transfer"]
    assert transfer.attributes["tandem.transfer.bytes"] == done.timings.transfer_bytes
    assert transfer.attributes["tandem.transfer.transport"] == "shm"
    assert {span.status for span in spans.values()} == {"UNSET"}


def test_a_cancelled_call_is_not_ok(client: Client, collector: Collector, caller: tuple[str, str]) -> None:
    stream = client.generate(PROMPT, max_tokens=900, n=16, ignore_eos=True)  # it would go on for many seconds
    for _ in range(17):  # the first token of each choice comes before the decode worker has all
        next(stream)
    stream.close()
    rpc = "tandem.v1.InferenceService/Generate"
    spans = trace_of(collector, caller[0], has(rpc, "generate", "decode"))
    assert spans["router", rpc].attributes["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]
    generate = spans["router", "generate"]
    assert (generate.status, generate.status_message) == ("ERROR", "cancelled")
    assert "gen_ai.response.finish_reasons" not in generate.attributes
    assert 0 < generate.attributes["gen_ai.usage.output_tokens"] < 16 * 900


def test_a_trace_that_the_caller_did_not_sample_is_not_exported(traced: Cluster, collector: Collector) -> None:
    trace_id = "5" * 32
    with grpc.insecure_channel(traced.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.CompleteRequest(generate=inference_pb2.GenerateRequest(text=PROMPT))
        request.generate.sampling.max_tokens = 4
        stub.Complete(request, metadata=(("traceparent", f"00-{trace_id}-{'6' * 16}-00"),), timeout=10)
        stub.Complete(request, metadata=(("traceparent", f"00-{'7' * 32}-{'6' * 16}-01"),), timeout=10)
    trace_of(collector, "7" * 32, has("generate", *WORK))
    assert trace_id not in {span.trace_id for span in collector.spans}


def test_streams_between_processes_and_probes_have_no_spans(client: Client, collector: Collector) -> None:
    client.status()
    client.complete(PROMPT, max_tokens=2)
    assert eventually(lambda: any(span.name.endswith("/Complete") for span in collector.spans))
    assert {span.attributes.get("rpc.service") for span in collector.spans} - {None} == {"tandem.v1.InferenceService"}


def test_each_process_sends_its_metrics_too(client: Client, collector: Collector) -> None:
    client.complete(PROMPT, max_tokens=2)

    def newest(service: str, *series: str) -> float:
        return next((each.values[series] for each in reversed(collector.metrics) if each.service == service), 0.0)

    assert eventually(lambda: newest("tandem-router", "tandem_completion_tokens_total") >= 2)
    for service in ("tandem-router", "tandem-prefill", "tandem-decode"):
        assert eventually(lambda service=service: newest(service, "tandem_serving") == 1)


def test_no_words_of_a_prompt_or_a_completion_leave_the_processes(client: Client, collector: Collector) -> None:
    done = client.complete(PROMPT, max_tokens=30, ignore_eos=True, request_id="silent")
    assert eventually(lambda: b"silent" in collector.raw)
    exported = collector.raw
    assert not any(word.encode() in exported for word in PROMPT.split() if len(word) > 3)
    assert not any(word.encode() in exported for word in done.text.split() if len(word) > 4)


@pytest.fixture(params=["dead", "hanging"])
def useless_endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """One where nobody listens, or where calls are taken and never answered."""
    if request.param == "hanging":
        with Collector(answers=False).serve() as endpoint:
            yield endpoint
    else:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and not listened at: connections are refused
            yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_without_a_working_collector_requests_go_on_and_processes_end_in_time(
    useless_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", useless_endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with serve("demo", *ONE_OF_EACH) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)

        def complained() -> bool:
            return any("traces cannot be exported" in line for line in cluster.log)

        def ask() -> bool:
            done = client.complete(PROMPT, max_tokens=8, ignore_eos=True, timeout_s=10)
            return done.usage.completion_tokens == 8 and complained()

        assert eventually(ask, 15)
        for _ in range(20):
            client.complete(PROMPT, max_tokens=8, ignore_eos=True, timeout_s=10)
        began_s = time.monotonic()
        assert cluster.stop() == 0
        assert time.monotonic() - began_s < STOP_S
    complaints = [line for line in cluster.log if "traces cannot" in line or "opentelemetry" in line.lower()]
    assert 1 <= len(complaints) <= 3  # one of each process
