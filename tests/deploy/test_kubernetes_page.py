"""docs/kubernetes.md names what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.dockerfile import parse
from tests.deploy.manifests import BESIDE_ANOTHER, ROOT, named, of_kind, overlay, own_overlay
from tests.deploy.pods import containers

PAGE = (ROOT / "docs/kubernetes.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line.split() for language, block in BLOCKS if not language for line in block.splitlines()]


def commands(*words: str) -> list[list[str]]:
    found = [command for command in COMMANDS if set(words) <= set(command)]
    assert found
    return found


def test_every_build_command_names_a_dockerfile_and_its_target() -> None:
    for command in commands("docker", "build"):
        file = ROOT / command[command.index("-f") + 1]
        stages = parse(file.read_text())
        target = command[command.index("--target") + 1] if "--target" in command else "router"
        assert target in stages
        image = command[command.index("-t") + 1]
        used = {each.spec["image"] for name in ("cpu", "gpu-pools") for each in containers(overlay(name))}
        assert image in used


def test_what_is_forwarded_or_scaled_is_there() -> None:
    manifests = [each for name in ("cpu", "elastic", BESIDE_ANOTHER) for each in overlay(name)]
    there = {(each["kind"].lower(), each["metadata"]["name"]) for each in manifests}
    assert set(re.findall(r"(service|deployment)/(tandem-[\w-]+)", PAGE)) <= there


SNIPPETS = [yaml.safe_load(block) for language, block in BLOCKS if language == "yaml"]
"""Whole kustomizations, and parts of one."""


@pytest.mark.parametrize("snippet", SNIPPETS, ids="+".join)
def test_every_overlay_of_the_page_renders_and_has_an_effect(tmp_path: Path, snippet: dict[str, Any]) -> None:
    whole = {"resources": ["../monitoring"], **snippet}
    plain = overlay(Path(whole["resources"][0]).name)
    assert own_overlay(tmp_path, whole) != plain


def test_images_of_the_page_come_from_the_registry_named(tmp_path: Path) -> None:
    (snippet,) = (each for each in SNIPPETS if "images" in each)
    images = [each.spec["image"] for each in containers(own_overlay(tmp_path, snippet))]
    assert all(image.startswith("registry.example.com/") for image in images)


def test_labels_of_the_page_reach_what_an_operator_selects(tmp_path: Path) -> None:
    (snippet,) = (each for each in SNIPPETS if "labels" in each)
    manifests = own_overlay(tmp_path, {"resources": ["../monitoring"], **snippet})
    for each in of_kind(manifests, "PodMonitor", "PrometheusRule"):
        assert each["metadata"]["labels"]["release"] == "kube-prometheus-stack"


@pytest.mark.parametrize("name", ["tandem-tls", "tandem-tokens"])
def test_secrets_are_made_with_the_keys_that_pods_and_prometheus_read(name: str) -> None:
    (command,) = commands("secret", name)
    made = {word.removeprefix("--from-file=") for word in command if word.startswith("--from-file=")}
    assert made == keys_read(name)


def keys_read(secret: str) -> set[str]:
    """Keys that mounted files or references name."""
    manifests = overlay("monitoring")
    keys: set[str] = set()
    for each in containers(manifests):
        for volume in each.pod["volumes"]:
            if volume.get("secret", {}).get("secretName") == secret:
                (mount,) = (m["mountPath"] for m in each.spec["volumeMounts"] if m["name"] == volume["name"])
                variables = each.environment().values()
                keys |= {value.removeprefix(f"{mount}/") for value in variables if value.startswith(f"{mount}/")}
    for endpoint in named(manifests, "PodMonitor", "tandem")["spec"]["podMetricsEndpoints"]:
        for reference in (endpoint["tlsConfig"]["ca"]["secret"], endpoint["authorization"]["credentials"]):
            keys |= {reference["key"]} if reference["name"] == secret else set()
    return keys
