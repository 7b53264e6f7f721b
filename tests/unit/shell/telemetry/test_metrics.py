"""One process's metrics as Prometheus reads them."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from shell.telemetry import gen_ai_names, vllm_names
from shell.telemetry import metric_names as names
from shell.telemetry.metric import Kind, Process
from shell.telemetry.metrics import Metrics, Reading
from tandem import __version__
from tandem.errors import InternalError


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Everything exposed, by name and sorted labels."""
    body, content_type = metrics.exposition()
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_what_is_read_is_asked_for_at_each_scrape() -> None:
    metrics = Metrics(Process.DECODE, "demo")
    values = iter((4, 5))
    metrics.add_reader(lambda: [Reading(names.RUNNING_SEQS, next(values))])
    assert samples(metrics)["tandem_running_seqs", ()] == 4
    assert samples(metrics)["tandem_running_seqs", ()] == 5


def test_a_histogram_shows_its_own_buckets_and_its_alias_those_of_vllm() -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    cells = metrics.histogram(names.TIME_TO_FIRST_TOKEN)
    for seconds in (0.003, 0.015, 0.3):
        cells.observe(seconds)
    shown = samples(metrics)
    vllm = (("engine", "0"), ("model_name", "demo"))
    assert shown["tandem_time_to_first_token_seconds_bucket", (("le", "0.005"),)] == 1
    assert shown["tandem_time_to_first_token_seconds_bucket", (("le", "0.02"),)] == 2
    assert ("tandem_time_to_first_token_seconds_bucket", (("le", "0.04"),)) not in shown
    assert shown["vllm:time_to_first_token_seconds_bucket", (vllm[0], ("le", "0.04"), vllm[1])] == 2
    assert shown["vllm:time_to_first_token_seconds_bucket", (vllm[0], ("le", "+Inf"), vllm[1])] == 3
    assert shown["vllm:time_to_first_token_seconds_count", vllm] == 3
    assert shown["vllm:time_to_first_token_seconds_sum", vllm] == pytest.approx(0.318)


def test_an_alias_says_label_values_in_its_own_words() -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    metrics.counter(names.REQUESTS).add(2, "cancelled")
    shown = samples(metrics)
    labels = (("engine", "0"), ("finished_reason", "abort"), ("model_name", "demo"))
    assert shown["vllm:request_success_total", labels] == 2


def test_counters_stand_at_zero_before_the_first_event() -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    metrics.counter(names.REQUESTS)
    metrics.counter(names.COMPLETION_TOKENS)
    shown = samples(metrics)
    assert {value for (name, _), value in shown.items() if name == "tandem_requests_total"} == {0}
    assert shown["tandem_completion_tokens_total", ()] == 0


def test_a_reader_with_nothing_to_tell_still_names_what_it_is_for() -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    metrics.add_reader(list, names.CERTIFICATE_EXPIRY)
    assert b"# TYPE tandem_tls_certificate_expiry_timestamp_seconds gauge\n" in metrics.exposition()[0]
    assert not [key for key in samples(metrics) if key[0] == names.CERTIFICATE_EXPIRY.name]


def test_build_info_and_the_process_are_always_there() -> None:
    shown = samples(Metrics(Process.PREFILL, "demo", "prefill-0"))
    labels = (("model", "demo"), ("role", "prefill"), ("version", __version__), ("worker_id", "prefill-0"))
    assert shown["tandem_build_info", labels] == 1
    assert shown["process_resident_memory_bytes", ()] > 0
    assert shown["process_start_time_seconds", ()] > 0


def test_a_metric_of_another_process_or_kind_is_refused() -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    with pytest.raises(InternalError, match="tandem_sampled_tokens_total is no counter of this process"):
        metrics.counter(names.SAMPLED_TOKENS)
    with pytest.raises(InternalError, match="tandem_requests_total is no histogram"):
        metrics.histogram(names.REQUESTS)


def test_names_are_unique_and_declarations_agree_with_themselves() -> None:
    declared = [*(each.name for each in names.ALL), *(each.name for each in vllm_names.ALL)]
    assert len(set(declared)) == len(declared)
    for metric in names.ALL:
        assert metric.name.startswith("tandem_")
        assert not (metric.buckets and metric.name.endswith("_total")), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert all(len(values) == len(metric.labels) for values in metric.presets), metric.name
        assert metric.text.endswith("."), metric.name


def test_names_of_opentelemetry_are_in_the_form_of_prometheus() -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    metrics.histogram(gen_ai_names.TIME_PER_OUTPUT_TOKEN, "chat").observe(0.02)
    labels = {"provider_name": "tandem", "operation_name": "chat", "request_model": "demo", "response_model": "demo"}
    key = tuple(sorted((f"gen_ai_{name}", value) for name, value in labels.items()))
    assert samples(metrics)["gen_ai_server_time_per_output_token_seconds_count", key] == 1


def test_an_alias_stands_for_one_metric_per_process_and_shows_it_as_its_kind() -> None:
    for alias in vllm_names.ALL:
        places = [process for metric in alias.of for process in metric.on]
        assert len(set(places)) == len(places), alias.name
        for metric in alias.of:
            assert bool(alias.buckets) == (metric.kind is Kind.HISTOGRAM), alias.name
            assert alias.name.endswith("_total") or metric.kind is not Kind.COUNTER, alias.name


PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
"""How Prometheus asks."""


@pytest.mark.parametrize("process", list(Process))
def test_who_asks_for_openmetrics_gets_it_with_traces(process: Process) -> None:
    metrics = Metrics(process, "demo")
    histograms = [each for each in names.ALL if each.kind is Kind.HISTOGRAM and process in each.on and not each.labels]
    for metric in histograms:
        metrics.histogram(metric).observe(0.015, trace_id="a" * 32)
    for metric in (each for each in names.ALL if each.kind is Kind.COUNTER and process in each.on):
        metrics.counter(metric)
    body, content_type = metrics.exposition(PROMETHEUS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in openmetrics_families(body.decode())}  # type: ignore[no-untyped-call]
    for metric in histograms:
        met = [sample for sample in families[metric.name].samples if sample.exemplar]
        assert [(each.exemplar.labels, each.exemplar.value) for each in met] == [({"trace_id": "a" * 32}, 0.015)]
    assert b"trace_id" not in metrics.exposition()[0]
