"""Metrics of real processes, scraped as Prometheus does it, and by Prometheus itself."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import yaml

from bench.support.cluster import Cluster, eventually, serve
from bench.support.ports import free_ports
from shell.telemetry import gen_ai_names, metric_names, vllm_names
from shell.telemetry.metric import Process
from tandem.client import Client
from tests.metric_references import DEPLOY, referenced_metrics
from tests.programs import program
from tests.scraped import counted, expositions, fetch

PROMETHEUS_TIMEOUT_S = 30.0


def families(exposition: str) -> set[str]:
    """Names as in PromQL."""
    return {line.split()[2] for line in exposition.splitlines() if line.startswith("# TYPE")}


def test_each_process_exposes_what_is_declared_for_it_and_nothing_else_of_ours(client: Client) -> None:
    with serve("demo", "--workers", "1", "--http", "127.0.0.1:0") as cluster, Client(cluster.target) as elastic:
        exposed = expositions(client) | expositions(elastic)
    assert exposed.keys() == set(Process)
    for process, exposition in exposed.items():
        declared = {each.name for each in metric_names.ALL if process in each.on}
        declared |= {each.name for each in vllm_names.ALL for metric in each.of if process in metric.on}
        declared |= {gen_ai_names.prometheus_name(each.name) for each in gen_ai_names.ALL if process in each.on}
        assert {name for name in families(exposition) if name.startswith(("tandem_", "vllm:", "gen_ai_"))} == declared
        assert "process_resident_memory_bytes" in families(exposition)


def test_every_metric_that_dashboards_rules_and_autoscalers_name_is_on_a_live_process(client: Client) -> None:
    live = {name for exposition in expositions(client).values() for name in families(exposition)}
    missing = {name: files for name, files in referenced_metrics().items() if name not in live}
    assert not missing


def test_a_generation_is_counted_once_wherever_it_went(client: Client) -> None:
    before = expositions(client)
    for _ in client.generate("Once upon a time", max_tokens=12, temperature=0.0, ignore_eos=True):
        pass

    def risen(process: Process, name: str, **labels: str) -> float:
        return counted(expositions(client)[process], name, **labels) - counted(before[process], name, **labels)

    router, prefill, decode = Process.ROUTER, Process.PREFILL, Process.DECODE
    assert risen(router, "tandem_requests_total", outcome="length") == 1
    assert risen(router, "tandem_completion_tokens_total") == 12
    assert risen(router, "vllm:generation_tokens_total") == 12
    assert risen(router, "tandem_time_to_first_token_seconds_count") == 1
    assert risen(router, "tandem_inter_token_seconds_count") == 11
    prompt_tokens = risen(router, "tandem_prompt_tokens_total")
    assert risen(prefill, "tandem_computed_prompt_tokens_total") == prompt_tokens > 0
    assert risen(prefill, "tandem_sampled_tokens_total") == 1
    assert risen(decode, "tandem_sampled_tokens_total") == 11
    for worker in (prefill, decode):
        assert eventually(partial(_let_go_of_one, risen, worker))
    num_bytes = risen(prefill, "tandem_transfer_bytes_total")
    assert risen(prefill, "vllm:nixl_bytes_transferred_sum") == num_bytes > 0
    assert risen(prefill, "vllm:nixl_xfer_time_seconds_count") == 1
    sources = "vllm:prompt_tokens_by_source_total"
    assert risen(prefill, sources, source="local_compute") == prompt_tokens
    assert risen(decode, sources, source="external_kv_transfer") == prompt_tokens
    assert risen(router, "vllm:request_time_per_output_token_seconds_count") == 1
    duration = "gen_ai_server_request_duration_seconds_count"
    assert risen(router, duration, gen_ai_operation_name="text_completion", error_type="") == 1


def _let_go_of_one(risen: Callable[..., float], worker: Process) -> bool:
    """The last word on a sequence may be a moment behind its last token."""
    return (
        risen(worker, "tandem_transfers_total", outcome="committed") == 1
        and risen(worker, "tandem_sequences_total", outcome="ended") == 1
    )


class Prometheus:
    """A running one, asked over its API."""

    def __init__(self, address: str) -> None:
        self._address = address

    def query(self, query: str) -> list[dict[str, Any]]:
        """The instant vector now; empty while it does not answer."""
        with contextlib.suppress(urllib.error.URLError):
            path = urllib.parse.urlencode({"query": query})
            answer = json.loads(fetch(f"http://{self._address}/api/v1/query?{path}"))
            result = answer["data"]["result"]
            assert isinstance(result, list)
            return result
        return []

    def soon(self, query: str, number: int) -> list[dict[str, Any]]:
        """The vector, once it has so many samples."""
        found: list[dict[str, Any]] = []

        def has_so_many() -> bool:
            found[:] = self.query(query)
            return len(found) == number

        assert eventually(has_so_many, PROMETHEUS_TIMEOUT_S), (query, found)
        return found


@pytest.fixture(scope="module")
def prometheus(demo_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A real one, configured as deploy/prometheus has it, but for the router's address and its pace."""
    source, folder = DEPLOY / "prometheus", tmp_path_factory.mktemp("prometheus")
    with Client(demo_cluster.target) as client:
        client.wait_ready(timeout_s=30)
        admin_address = client.status().admin_address
    config = yaml.safe_load((source / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(source / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["http_sd_configs"] = [{"url": f"http://{admin_address}/targets", "refresh_interval": "1s"}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)  # Prometheus does not tell which one it took
    address = f"127.0.0.1:{port}"
    arguments = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program("prometheus"), *(f"--{name}={value}" for name, value in arguments.items())],
            stdout=log,
            stderr=log,
        )
        try:
            yield Prometheus(address)
        finally:
            process.terminate()
            process.wait(PROMETHEUS_TIMEOUT_S)


def test_prometheus_finds_every_process_by_the_router_and_answers_queries(prometheus: Prometheus) -> None:
    up = prometheus.soon('up{job="tandem"} == 1', 3)
    assert {sample["metric"]["role"] for sample in up} == {"router", "prefill", "decode"}
    info = prometheus.soon("tandem_build_info", 3)
    assert {sample["metric"]["worker_id"] for sample in info if "worker_id" in sample["metric"]} == {
        "prefill-0",
        "decode-0",
    }
    (ready,) = prometheus.soon('tandem_router_workers{worker_role="decode", state="ready"}', 1)
    assert ready["value"][1] == "1"


def test_queries_of_the_dashboard_and_the_rules_find_what_they_ask_for(prometheus: Prometheus, client: Client) -> None:
    prometheus.soon("tandem:worker:kv_pool_usage_ratio", 2)
    prometheus.soon("tandem_completion_tokens_total", 1)
    for _ in client.generate("Once upon a time", max_tokens=12, temperature=0.0):
        pass
    for _ in range(30):  # a late first token of a single request would be an alert
        client.complete("Once", max_tokens=1)
    prometheus.soon("sum(increase(tandem_completion_tokens_total[1m])) > 0", 1)
    assert prometheus.query("sum(rate(tandem_requests_total[1m]))")
    assert prometheus.query('ALERTS{alertstate="firing"}') == []
    asked = _dashboard_queries()
    assert len(asked) > 50
    assert eventually(lambda: not [each for each in asked if not prometheus.query(each)], PROMETHEUS_TIMEOUT_S), [
        each for each in asked if not prometheus.query(each)
    ]


def _dashboard_queries() -> list[str]:
    """As Grafana asks them, but for calls that end badly: they have no series before the first does.

    What is asked of elastic workers is asked of all: these here are static, and expose the same metrics.
    """
    dashboard = json.loads((DEPLOY / "grafana" / "tandem.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [
        query.replace("$__rate_interval", "1m")
        .replace("$namespace", ".*")
        .replace("$model", "demo")
        .replace('role="elastic"', 'role=~".+"')
        for query in queries
        if 'code!="OK"' not in query
    ]
