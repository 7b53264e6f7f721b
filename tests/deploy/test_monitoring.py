"""What watches Tandem in a cluster, against what there is to watch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, composed, matches, named, of_kind, overlay
from tests.deploy.pods import containers
from tests.programs import program

MONITORED = pytest.mark.parametrize("name", ["monitoring", "autoscale-hpa", "autoscale-keda", "elastic-hpa"])


@MONITORED
def test_every_process_is_scraped_once_at_its_admin_port(name: str) -> None:
    manifests = overlay(name)
    spec = named(manifests, "PodMonitor", "tandem")["spec"]
    ports = [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]
    for each in containers(manifests):
        assert matches(spec["selector"]["matchLabels"], each.labels)
        (port,) = (each.ports[port] for port in ports if port in each.ports)
        assert each.config().admin_listen == f"0.0.0.0:{port}"


@MONITORED
def test_scraping_shows_the_authority_and_the_token_that_the_processes_expect(name: str) -> None:
    manifests = overlay(name)
    (security,) = (
        each["data"] for each in of_kind(manifests, "ConfigMap") if "TANDEM_TLS_CERT" in each.get("data", {})
    )
    secrets = {
        v["secret"]["secretName"] for each in containers(manifests) for v in each.pod["volumes"] if "secret" in v
    }
    for endpoint in named(manifests, "PodMonitor", "tandem")["spec"]["podMetricsEndpoints"]:
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["serverName"] == security["TANDEM_TLS_SERVER_NAME"]
        assert {
            endpoint["tlsConfig"]["ca"]["secret"]["name"],
            endpoint["authorization"]["credentials"]["name"],
        } == secrets


@pytest.mark.parametrize("base", ["overlays/dev", "overlays/cpu", "overlays/elastic"])
def test_without_tls_and_tokens_scraping_needs_neither(tmp_path: Path, base: str) -> None:
    manifests = composed(tmp_path, base, ["monitoring", "insecure"])
    endpoints = named(manifests, "PodMonitor", "tandem")["spec"]["podMetricsEndpoints"]
    whole = named(overlay("monitoring"), "PodMonitor", "tandem")["spec"]["podMetricsEndpoints"]
    assert [each["port"] for each in endpoints] == [each["port"] for each in whole]
    assert all(each["scheme"] == "http" and not each.keys() & {"tlsConfig", "authorization"} for each in endpoints)
    assert all(each.config().security.insecure for each in containers(manifests))


def test_the_rules_are_those_of_prometheus_alone() -> None:
    groups = named(overlay("monitoring"), "PrometheusRule", "tandem")["spec"]["groups"]
    sources = sorted((DEPLOY / "prometheus").glob("*.yml"))
    wanted = [group for source in sources for group in yaml.safe_load(source.read_text()).get("groups", [])]
    assert sorted(groups, key=lambda g: g["name"]) == sorted(wanted, key=lambda g: g["name"])


def test_prometheus_accepts_the_rules_as_rendered(tmp_path: Path) -> None:
    spec = named(overlay("monitoring"), "PrometheusRule", "tandem")["spec"]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(spec))
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
