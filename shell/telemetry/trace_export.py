"""What OpenTelemetry's variables say of exporting spans. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GRPC, HTTP = "grpc", "http/protobuf"
"""What OTEL_EXPORTER_OTLP_PROTOCOL can say here."""


@dataclass(frozen=True, slots=True)
class TraceExport:
    """What OpenTelemetry's variables say of exporting spans; all else its SDK reads by itself."""

    wanted: bool
    obstacle: str | None = None
    """Reason why traces cannot be exported."""
    sets_timeout: bool = False
    """Whether the operator gave a timeout, which replaces Tandem's own."""
    sets_batch_size: bool = False
    protocol: str = GRPC
    foreign_propagators: str = ""
    """OTEL_PROPAGATORS, where it leaves out W3C's trace context, the only one that is spoken."""

    @property
    def possible(self) -> bool:
        """Whether to export."""
        return self.wanted and self.obstacle is None


def trace_export(environ: Mapping[str, str]) -> TraceExport:
    """Off, unless an exporter or the address of a collector is named."""
    variables = {name: value.strip() for name, value in environ.items()}

    def given(*names: str) -> str:
        return next((variables[name] for name in names if variables.get(name)), "")

    exporters = {name.strip() for name in given("OTEL_TRACES_EXPORTER").lower().split(",") if name.strip()}
    endpoint = given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if given("OTEL_SDK_DISABLED").lower() == "true" or exporters == {"none"} or not (exporters or endpoint):
        return TraceExport(wanted=False)
    obstacle = None
    if exporters and "otlp" not in exporters:
        obstacle = f"OTEL_TRACES_EXPORTER={','.join(sorted(exporters))}; only otlp is known"
    protocol = given("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL").lower()
    if protocol not in {"", GRPC, HTTP}:
        obstacle = f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}; only {GRPC} and {HTTP} are known"
    timeout = given("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    propagators = given("OTEL_PROPAGATORS")
    foreign = "" if "tracecontext" in propagators.lower() else propagators
    sets_batch_size = bool(given("OTEL_BSP_MAX_EXPORT_BATCH_SIZE"))
    return TraceExport(True, obstacle, bool(timeout), sets_batch_size, protocol or GRPC, foreign)
