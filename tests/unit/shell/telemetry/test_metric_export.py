"""Metrics at a collector: what comes, and what one that hangs or refuses does to the process."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from opentelemetry.sdk.metrics.export import Histogram, Metric, Sum
from opentelemetry.sdk.resources import Resource

from shell.telemetry import gen_ai_names, metric_export, sdk_export
from shell.telemetry import metric_names as names
from shell.telemetry.metric import Process
from shell.telemetry.metric_points import MetricPoints
from shell.telemetry.metrics import Metrics, Reading
from shell.telemetry.otlp import Signal, exporting_metrics, otlp_export
from tests.collector import Collector

CLOSE_S = 2.0
"""What leaving may take, and a slow machine's own time."""


@pytest.fixture(autouse=True)
def filters_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*sdk_export.NOISY_LOGGERS, sdk_export.HEADERS_LOGGER):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])


@pytest.fixture
def metrics() -> Metrics:
    """A router's, with a few figures."""
    metrics = Metrics(Process.ROUTER, "demo")
    metrics.counter(names.REQUESTS).add(2, "stop")
    metrics.add_reader(lambda: [Reading(names.ROUTER_QUEUED_REQUESTS, 7)])
    metrics.histogram(names.INTER_TOKEN).observe(0.004, 3)
    metrics.histogram(names.INTER_TOKEN).observe(99.0)
    metrics.histogram(gen_ai_names.REQUEST_DURATION, "chat", "").observe(0.5)
    metrics.histogram(gen_ai_names.REQUEST_DURATION, "chat", "cancelled").observe(0.1)
    return metrics


def read(metrics: Metrics) -> dict[str, Metric]:
    data = MetricPoints(metrics, Resource.create({"service.name": "tandem-router"})).read()
    ((scope,),) = [group.scope_metrics for group in data.resource_metrics]
    return {metric.name: metric for metric in scope.metrics}


def test_a_histogram_keeps_its_bounds_and_counts_each_bucket_once(metrics: Metrics) -> None:
    metric = read(metrics)["tandem_inter_token_seconds"]
    assert isinstance(metric.data, Histogram)
    (point,) = metric.data.data_points
    assert (point.count, point.sum, metric.unit) == (4, pytest.approx(99.012), "s")
    assert tuple(point.explicit_bounds) == names.INTER_TOKEN.buckets
    assert point.bucket_counts[names.INTER_TOKEN.buckets.index(0.005)] == 3
    assert point.bucket_counts[-1] == 1
    assert sum(point.bucket_counts) == 4


def test_counters_are_sums_that_only_rise_and_gauges_are_gauges(metrics: Metrics) -> None:
    found = read(metrics)
    requests = found["tandem_requests_total"].data
    assert isinstance(requests, Sum)
    assert requests.is_monotonic
    assert {point.attributes["outcome"]: point.value for point in requests.data_points if point.attributes}["stop"] == 2
    assert [point.value for point in found["tandem_router_queued_requests"].data.data_points] == [7]


def test_names_of_the_conventions_have_dots_and_those_of_vllm_are_left_out(metrics: Metrics) -> None:
    found = read(metrics)
    points = found["gen_ai.server.request.duration"].data.data_points
    always = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
    }
    assert [point.attributes for point in points] == [always, always | {"error.type": "cancelled"}]
    assert found["gen_ai.server.request.duration"].unit == "s"
    assert not [name for name in found if ":" in name]


async def test_what_is_read_comes_to_the_collector_again_and_again_and_at_the_end(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_export, "LAST_S", 20.0)
    monkeypatch.setattr(metric_export, "EXPORT_TIMEOUT_S", 20.0)
    monkeypatch.setenv(metric_export.INTERVAL, "10")
    collector = Collector()
    with collector.serve() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with exporting_metrics(metrics, "tandem-router", "r0"):
            async with asyncio.timeout(30):
                while len(collector.metrics) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            metrics.counter(names.REQUESTS).add(3, "stop")
    assert collector.metrics[0].service == "tandem-router"
    assert collector.metrics[0].values["tandem_requests_total", "stop"] == 2
    assert collector.metrics[-1].values["tandem_requests_total", "stop"] == 5


async def test_a_collector_that_hangs_does_not_hold_the_end(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector(answers=False)
    with collector.serve() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
        with exporting_metrics(metrics, "tandem-router"):
            began_s = time.monotonic()
        assert time.monotonic() - began_s < CLOSE_S


@pytest.mark.parametrize("interval", ["often", "0", "-1", "nan", "inf"])
async def test_an_interval_that_makes_no_sense_is_told_and_the_process_goes_on(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, interval: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(metric_export.INTERVAL, interval)
    with exporting_metrics(metrics, "tandem-router"):
        pass
    (warning,) = [record for record in caplog.records if record.name.startswith("shell")]
    assert metric_export.INTERVAL in warning.fields["obstacle"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("environ", "exports"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_TRACES_EXPORTER": "none"}, True),
    ],
)
def test_metrics_have_variables_of_their_own(environ: dict[str, str], exports: bool) -> None:
    assert (otlp_export(environ, Signal.METRICS) is not None) is exports
