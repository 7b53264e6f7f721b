"""The flows that NetworkPolicies admit are exactly those that the processes need."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.deploy.manifests import OVERLAYS, Manifest, composed, of_kind, overlay
from tests.deploy.network import Flow, Pod, admits
from tests.deploy.pods import Container, containers

EVERY_OVERLAY = pytest.mark.parametrize("name", OVERLAYS)

HOME = "tandem"
DNS_PORT = 53
STRANGE_PORT = 4444


def outsider(name: str, namespace: str, labels: dict[str, str] | None = None, **namespace_labels: str) -> Pod:
    known = {"kubernetes.io/metadata.name": namespace}
    return Pod(
        name, namespace, labels or {}, known | {key.replace("__", "/"): v for key, v in namespace_labels.items()}
    )


CLIENTS = (
    outsider("client at home", HOME, {"tandem/client": "true"}),
    outsider("client in its own namespace", "apps", tandem__client="true"),
)
DNS = outsider("dns", "kube-system", {"k8s-app": "kube-dns"})
PROMETHEUS = outsider("prometheus", "monitoring", {"app": "prometheus"})
STRANGERS = (
    outsider("stranger at home", HOME),
    outsider("stranger elsewhere", "apps-2", {"tandem/client": "true"}),
    outsider("stranger in kube-system", "kube-system"),
)
OUTSIDERS = (*CLIENTS, DNS, PROMETHEUS, *STRANGERS)


def pods_of(manifests: Iterable[Manifest]) -> list[tuple[Pod, dict[str, int]]]:
    """One pod of every workload, with its ports by name."""
    found: dict[str, tuple[Pod, dict[str, int]]] = {}
    for each in containers(manifests):
        workload = each.workload["metadata"]
        assert workload["namespace"] == HOME
        pod = Pod(workload["name"], HOME, each.labels, {"kubernetes.io/metadata.name": HOME})
        found.setdefault(pod.name, (pod, {"strange": STRANGE_PORT}))[1].update(each.ports | picked_ports(each))
    return list(found.values())


def picked_ports(each: Container) -> dict[str, int]:
    """The first port of the range that the kernel picks from, where the pod sets one."""
    for setting in each.pod["securityContext"].get("sysctls", []):
        assert setting["name"] == "net.ipv4.ip_local_port_range"
        return {"picked": int(setting["value"].split()[0])}
    return {}


def needed(source: Pod, target: Pod, port_name: str, *, monitored: bool) -> bool:
    """Whether Tandem needs this connection to serve."""
    router = target.labels.get("app.kubernetes.io/component") == "router"
    from_router = source.labels.get("app.kubernetes.io/component") == "router"
    match port_name:
        case "grpc" | "http":
            return router and (source in CLIENTS or (port_name == "grpc" and "tandem/worker" in source.labels))
        case "grpc-prefill" | "grpc-decode":
            return from_router
        case "kv":
            return "tandem/prefill" in source.labels or "tandem/decode" in source.labels
        case "picked":
            return "tandem/worker" in source.labels and "tandem/worker" in target.labels
        case "dns":
            return target is DNS and "tandem/worker" in source.labels
        case _:
            return monitored and port_name.startswith("admin") and source is PROMETHEUS


def wrong_flows(manifests: list[Manifest]) -> list[str]:
    """Flows that are admitted and not needed, or needed and not admitted."""
    policies = of_kind(manifests, "NetworkPolicy")
    monitored = bool(of_kind(manifests, "PodMonitor"))
    ours = pods_of(manifests)
    outside = {"dns": DNS_PORT, "strange": STRANGE_PORT}
    within = itertools.product([*(pod for pod, _ in ours), *OUTSIDERS], ours)
    outward = itertools.product([pod for pod, _ in ours], [(each, outside) for each in OUTSIDERS])
    wrong = []
    for source, (target, ports) in itertools.chain(within, outward):
        for port_name, port in ports.items():
            wanted = needed(source, target, port_name, monitored=monitored)
            for protocol in ("TCP", "UDP"):
                flow = Flow(source, target, port, protocol)
                if admits(policies, flow) != (wanted and (protocol == "TCP" or port_name == "dns")):
                    wrong.append(str(flow))
    return wrong


@EVERY_OVERLAY
def test_the_flows_admitted_are_those_needed(name: str) -> None:
    assert wrong_flows(overlay(name)) == []


def test_the_flows_of_elastic_workers_beside_the_others_are_those_needed(tmp_path: Path) -> None:
    manifests = composed(tmp_path, "overlays/monitoring", ["elastic"])
    assert len(pods_of(manifests)) == 4
    assert wrong_flows(manifests) == []


@pytest.mark.parametrize("name", ["tandem-router", "tandem-prefill", "tandem-decode", "tandem-worker"])
def test_a_missing_policy_is_noticed(name: str) -> None:
    manifests = [each for each in overlay("cpu") if (each["kind"], each["metadata"]["name"]) != ("NetworkPolicy", name)]
    assert wrong_flows(manifests)


def test_ports_that_libraries_pick_are_closed_without_the_policy_for_them() -> None:
    manifests = [each for each in overlay("gpu-nixl") if each["metadata"]["name"] != "tandem-peers"]
    assert "tandem-prefill -> tandem-decode:50100/TCP" in wrong_flows(manifests)
