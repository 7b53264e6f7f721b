"""Every manifest against the schema of its kind: Kubernetes' own, or one in deploy/schemas for custom resources."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import (
    BESIDE_ANOTHER,
    COMPONENTS,
    DEPLOY,
    OVERLAYS,
    Manifest,
    composed,
    named,
    of_kind,
    overlay,
)

OLDEST = "1.30"
"""The first Kubernetes that knows a pre-stop sleep without being asked to."""
VERSIONS = (OLDEST, kubernetes_validate.latest_version())
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (DEPLOY / "schemas").glob("*.json")}
TOGETHER = (
    ("base", ["cert-manager"]),
    ("base", ["insecure"]),
    ("overlays/gpu-pools", ["cert-manager", "monitoring", "autoscale-hpa"]),
    ("overlays/gpu-pools", ["cert-manager", "monitoring", "autoscale-keda"]),
    ("overlays/gpu-pools", ["peer-ports", "rdma", "insecure"]),
    ("overlays/gpu-pools", ["new-weights"]),
    ("overlays/gpu-same-pod", ["inference-pool", "insecure"]),
    ("overlays/gpu-same-pod", ["cert-manager", "monitoring"]),
    ("overlays/cpu", ["model-volume", "insecure"]),
    ("overlays/monitoring", ["insecure"]),
    ("overlays/cpu", ["model-volume", "model-fetch", "router-files"]),
    ("overlays/cpu", ["model-claim", "gateway"]),
    ("overlays/cpu", ["ingress"]),
    ("overlays/cpu", ["elastic", "monitoring", "autoscale-hpa", "autoscale-hpa-elastic"]),
    ("overlays/elastic", ["insecure"]),
    ("overlays/elastic", ["gpu", "model-volume", "peer-ports", "rdma", "cert-manager"]),
)
"""Overlays that users may make."""
TOGETHER_LATER = (
    ("overlays/cpu", ["model-image"]),
    ("overlays/cpu", ["model-image", "router-files"]),
    ("overlays/gpu", ["gpu-claims"]),
    ("overlays/gpu-nixl", ["gpu-claims"]),
)
"""Those that want a newer Kubernetes."""


def check(manifest: Manifest, version: str) -> None:
    """Raises jsonschema.ValidationError; a kind of which nobody has a schema is an error too."""
    if manifest["kind"].lower() in SCHEMAS:
        jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"].lower()]).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [*OVERLAYS, BESIDE_ANOTHER])
def test_every_manifest_is_valid(name: str, version: str) -> None:
    for manifest in overlay(name):
        check(manifest, version)


@pytest.mark.parametrize(("base", "components"), TOGETHER, ids=str)
def test_components_go_together(tmp_path: Path, base: str, components: list[str]) -> None:
    for manifest in composed(tmp_path, base, components):
        check(manifest, OLDEST)


@pytest.mark.parametrize(("base", "components"), TOGETHER_LATER, ids=str)
def test_components_that_want_a_newer_kubernetes_go_together(tmp_path: Path, base: str, components: list[str]) -> None:
    for manifest in composed(tmp_path, base, components):
        check(manifest, VERSIONS[-1])


def test_every_component_is_part_of_an_overlay_that_was_checked() -> None:
    used = {name for _, components in (*TOGETHER, *TOGETHER_LATER) for name in components}
    for name in OVERLAYS:
        text = (DEPLOY / "overlays" / name / "kustomization.yaml").read_text()
        used |= {component for component in COMPONENTS if f"../../components/{component}\n" in text}
    assert used == set(COMPONENTS)


def objects_open_to_anything(schema: Any, path: str = "") -> Iterator[str]:
    """Paths of objects that would take a misspelt field."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "additionalProperties" not in schema:
            yield path
        for key, value in schema.items():
            yield from objects_open_to_anything(value, f"{path}/{key}")


def spoilt(overlay_name: str, kind: str, name: str, spoil: Callable[[dict[str, Any]], object]) -> Manifest:
    manifest = named(overlay(overlay_name), kind, name)
    spoil(manifest["spec"])
    return manifest


def spoilt_route(spoil: Callable[[dict[str, Any]], object]) -> Manifest:
    (manifest, *_) = yaml.safe_load_all((DEPLOY / "components/gateway/routes.yaml").read_text())
    spoil(manifest["spec"])
    return dict(manifest)


@pytest.mark.parametrize(
    "manifest",
    [
        lambda: spoilt("cpu", "Deployment", "tandem-router", lambda spec: spec.update(replica=2)),
        lambda: spoilt("cpu", "NetworkPolicy", "tandem-router", lambda spec: spec.update(policyTypes="Ingress")),
        lambda: spoilt("monitoring", "PodMonitor", "tandem", lambda spec: spec.update(selectors={})),
        lambda: spoilt("monitoring", "PodMonitor", "tandem", lambda spec: spec["podMetricsEndpoints"][0].pop("port")),
        lambda: spoilt("autoscale-keda", "ScaledObject", "tandem-decode", lambda spec: spec.update(minReplicas=1)),
        lambda: spoilt("autoscale-keda", "ScaledObject", "tandem-decode", lambda spec: spec.pop("triggers")),
        lambda: spoilt_route(lambda spec: spec["rules"][0].update(backend=[])),
        lambda: spoilt("autoscale-hpa", "HorizontalPodAutoscaler", "tandem-decode", lambda spec: spec.update(least=1)),
        lambda: {"apiVersion": "v1", "kind": "Nothing", "metadata": {"name": "n"}},
    ],
)
def test_a_misspelt_or_missing_field_is_noticed(manifest: Callable[[], Manifest]) -> None:
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError)):
        check(manifest(), OLDEST)


def test_certificates_name_the_secret_that_pods_mount_and_the_server_that_they_expect(tmp_path: Path) -> None:
    manifests = composed(tmp_path, "overlays/cpu", ["cert-manager"])
    certificate = named(manifests, "Certificate", "tandem")["spec"]
    (security,) = (each["data"] for each in of_kind(manifests, "ConfigMap") if "security" in each["metadata"]["name"])
    assert certificate["secretName"] == "tandem-tls"
    assert security["TANDEM_TLS_SERVER_NAME"] in certificate["dnsNames"]
    authority = named(manifests, "Certificate", "tandem-authority")["spec"]
    issuer = named(manifests, "Issuer", certificate["issuerRef"]["name"])["spec"]
    assert issuer["ca"]["secretName"] == authority["secretName"]
    assert "selfSigned" in named(manifests, "Issuer", authority["issuerRef"]["name"])["spec"]
