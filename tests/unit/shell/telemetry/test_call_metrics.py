"""gRPC calls, counted."""

from __future__ import annotations

from shell.telemetry.call_metrics import CallMetrics
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics


def exposed(metrics: Metrics) -> list[str]:
    """The lines of gRPC metrics, without comments."""
    return [line for line in metrics.exposition()[0].decode().splitlines() if line.startswith("tandem_grpc")]


def test_calls_are_counted_by_service_method_and_status() -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    calls = CallMetrics(metrics)
    calls.began("/tandem.v1.InferenceService/Generate")
    calls.began("/tandem.v1.InferenceService/Generate")
    calls.ended("/tandem.v1.InferenceService/Generate", "RESOURCE_EXHAUSTED")
    where = 'method="Generate",service="tandem.v1.InferenceService"'
    assert exposed(metrics) == [
        f'tandem_grpc_server_calls_total{{code="RESOURCE_EXHAUSTED",{where}}} 1.0',
        f"tandem_grpc_server_calls_in_flight{{{where}}} 1.0",
    ]
