"""A call made within a span is part of its trace, and one made outside of any is not."""

from __future__ import annotations

from typing import Any

from shell.telemetry.trace_context import traceparent_of
from tandem.client import AsyncClient, Client
from tests.recorded_spans import RecordedSpans


def test_a_call_within_a_span_carries_it(server: Any) -> None:
    with Client(server.target) as client, RecordedSpans().tracer.start_as_current_span("caller") as span:
        client.complete("p")
        list(client.generate("p"))
        expected = traceparent_of(span.get_span_context())
    assert [metadata["traceparent"] for metadata in server.router.metadata] == [expected] * 2


async def test_an_asynchronous_call_within_a_span_carries_it(server: Any) -> None:
    async with AsyncClient(server.target) as client:
        with RecordedSpans().tracer.start_as_current_span("caller") as span:
            await client.complete("p")
            assert [update async for update in client.generate("p")] == []
            expected = traceparent_of(span.get_span_context())
    assert [metadata["traceparent"] for metadata in server.router.metadata] == [expected] * 2


def test_a_call_outside_of_any_span_leaves_the_trace_to_the_server(server: Any) -> None:
    with Client(server.target) as client:
        client.complete("p")
    (metadata,) = server.router.metadata
    assert "traceparent" not in metadata
