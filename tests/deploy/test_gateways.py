"""What stands between clients outside and routers: whom it lets in, and where it leads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from router.faces.openai.face import openapi_document
from tests.deploy.manifests import DEPLOY, Manifest, composed, matches, named, of_kind, pod_labels
from tests.deploy.network import Flow, Pod, admits
from tests.deploy.pods import container, containers
from tests.deploy.test_workloads import security_complaints

HOME = "tandem"
WAYS = {
    "gateway": ("overlays/cpu", ["gateway"], "gateway", {50051, 8080}),
    "ingress": ("overlays/cpu", ["ingress"], "ingress-nginx", {50051, 8080}),
    "inference-pool": ("overlays/gpu-same-pod", ["inference-pool", "insecure"], "gateway", {8080}),
}
"""Component → overlay, components, namespace of what comes in, ports that it may reach."""
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def manifests_of(way: str, folder: Path) -> list[Manifest]:
    base, components, _, _ = WAYS[way]
    return composed(folder, base, components)


def pod(name: str, namespace: str, labels: dict[str, str]) -> Pod:
    return Pod(name, namespace, labels, {"kubernetes.io/metadata.name": namespace})


def router_of(manifests: list[Manifest]) -> Pod:
    return pod("router", HOME, pod_labels(named(manifests, "Deployment", "tandem-router")))


@EVERY_WAY
def test_it_reaches_the_ports_of_clients_and_no_others(way: str, tmp_path: Path) -> None:
    manifests = manifests_of(way, tmp_path)
    _, _, namespace, ports = WAYS[way]
    policies = of_kind(manifests, "NetworkPolicy")
    outside = pod("gateway", namespace, {})
    declared = container(manifests, "router").ports.values()
    assert {port for port in declared if admits(policies, Flow(outside, router_of(manifests), port))} == ports
    assert not admits(policies, Flow(pod("stranger", "elsewhere", {}), router_of(manifests), 8080))


def backends(manifests: list[Manifest]) -> set[tuple[str, Any]]:
    """Service and port of each rule of a route or an Ingress."""
    routes = of_kind(manifests, "GRPCRoute", "HTTPRoute")
    found = {
        (ref["name"], ref["port"]) for each in routes for rule in each["spec"]["rules"] for ref in rule["backendRefs"]
    }
    for each in of_kind(manifests, "Ingress"):
        for path in each["spec"]["rules"][0]["http"]["paths"]:
            service = path["backend"]["service"]
            found.add((service["name"], service["port"]["name"]))
    return found


@pytest.mark.parametrize("way", ["gateway", "ingress"])
def test_it_leads_to_both_ports_of_the_service_of_routers(way: str, tmp_path: Path) -> None:
    manifests = manifests_of(way, tmp_path)
    ports = named(manifests, "Service", "tandem-router")["spec"]["ports"]
    key = "port" if way == "gateway" else "name"
    assert backends(manifests) == {("tandem-router", each[key]) for each in ports}


def test_routes_of_two_kinds_have_host_names_of_their_own(tmp_path: Path) -> None:
    grpc, http = of_kind(manifests_of("gateway", tmp_path), "GRPCRoute", "HTTPRoute")
    assert not set(grpc["spec"]["hostnames"]) & set(http["spec"]["hostnames"])


@EVERY_WAY
def test_what_passes_over_http_is_the_two_apis(way: str, tmp_path: Path) -> None:
    manifests = manifests_of(way, tmp_path)
    rules = [rule for each in of_kind(manifests, "HTTPRoute") for rule in each["spec"]["rules"]]
    prefixes = {match["path"]["value"] for rule in rules for match in rule["matches"]}
    for each in of_kind(manifests, "Ingress"):
        if each["metadata"]["name"] == "tandem-http":
            prefixes |= {path["path"] for path in each["spec"]["rules"][0]["http"]["paths"]}
    assert prefixes == {"/v1"}
    assert {path for path in openapi_document()["paths"] if not path.startswith("/v1/")} >= {"/metrics", "/health"}


@pytest.fixture
def pool(tmp_path: Path) -> list[Manifest]:
    return manifests_of("inference-pool", tmp_path)


def test_the_members_of_a_pool_are_routers_at_their_http_port(pool: list[Manifest]) -> None:
    spec = named(pool, "InferencePool", "tandem")["spec"]
    members = [
        each for each in of_kind(pool, "Deployment") if matches(spec["selector"]["matchLabels"], pod_labels(each))
    ]
    assert [each["metadata"]["name"] for each in members] == ["tandem-router"]
    router = container(pool, "router")
    assert spec["targetPorts"] == [{"number": router.ports["http"]}]
    assert router.config().security.insecure  # neither the gateway nor the picker brings TLS and a token
    (rule,) = named(pool, "HTTPRoute", "tandem-pool")["spec"]["rules"]
    assert [ref["name"] for ref in rule["backendRefs"]] == ["tandem"]


def test_the_picker_is_asked_for_this_pool_and_may_watch_it(pool: list[Manifest]) -> None:
    reference = named(pool, "InferencePool", "tandem")["spec"]["endpointPickerRef"]
    service = named(pool, "Service", reference["name"])["spec"]
    picker = container(pool, "picker")
    assert matches(service["selector"], picker.labels)
    (port,) = service["ports"]
    assert (port["port"], picker.ports[port["targetPort"]]) == (reference["port"]["number"], 9002)
    assert "--pool-name=tandem" in picker.spec["args"]
    watched = {(rule["apiGroups"][0], rule["resources"][0]) for rule in named(pool, "Role", "tandem-picker")["rules"]}
    assert {("", "pods"), ("inference.networking.k8s.io", "inferencepools")} <= watched
    (subject,) = named(pool, "RoleBinding", "tandem-picker")["subjects"]
    assert (subject["name"], subject["namespace"]) == (picker.pod["serviceAccountName"], HOME)


def test_the_picker_reaches_the_metrics_of_members_and_only_the_gateway_reaches_the_picker(
    pool: list[Manifest],
) -> None:
    policies = of_kind(pool, "NetworkPolicy")
    picker = pod("picker", HOME, container(pool, "picker").labels)
    assert admits(policies, Flow(picker, router_of(pool), 8080))
    assert not admits(policies, Flow(picker, router_of(pool), 9090))
    assert admits(policies, Flow(pod("gateway", "gateway", {}), picker, 9002))
    assert not admits(policies, Flow(router_of(pool), picker, 9002))


def test_the_picker_s_pod_is_as_restricted_as_others_but_for_the_api_that_it_watches(pool: list[Manifest]) -> None:
    assert security_complaints(container(pool, "picker")) == ["has the API's token", "writes elsewhere"]


def test_the_picker_s_profile_uses_plugins_that_it_names(pool: list[Manifest]) -> None:
    (config,) = (each["data"] for each in of_kind(pool, "ConfigMap") if "picker-config.yaml" in each["data"])
    read = yaml.safe_load(config["picker-config.yaml"])
    used = {each["pluginRef"] for profile in read["schedulingProfiles"] for each in profile["plugins"]}
    assert used == {each["type"] for each in read["plugins"]}
    assert (DEPLOY / "components/inference-pool/picker-config.yaml").read_text() == config["picker-config.yaml"]


def test_all_other_containers_of_a_pool_are_those_of_whole_servers(pool: list[Manifest]) -> None:
    assert [each.name for each in containers(pool)] == ["picker", "router"]
