"""A real tracer whose spans stay in memory."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased


class RecordedSpans:
    """Spans that have ended, in that order."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.all]

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all if span.name == name]
        return span

    def attributes(self, name: str) -> dict[str, object]:
        return dict(self.one(name).attributes or {})

    def events(self, name: str) -> list[str]:
        return [event.name for event in self.one(name).events]

    def failure(self, name: str) -> str | None:
        """The reason with which it was marked; None if it was not."""
        span = self.one(name)
        assert span.status.is_ok or span.status.description == (span.attributes or {})["error.type"]
        return span.status.description
