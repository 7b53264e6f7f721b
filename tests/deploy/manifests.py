"""What `kubectl kustomize` makes of deploy/, as plain data: rendered once per session, copied for each test."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.programs import program

Manifest = dict[str, Any]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BESIDE_ANOTHER = "new-weights"
"""The overlay that is applied beside one that serves."""
OVERLAYS = tuple(
    sorted({path.parent.name for path in (DEPLOY / "overlays").glob("*/kustomization.yaml")} - {BESIDE_ANOTHER})
)
"""Those that serve by themselves."""
COMPONENTS = tuple(sorted(path.parent.name for path in (DEPLOY / "components").glob("*/kustomization.yaml")))


def overlay(name: str) -> list[Manifest]:
    """The overlay's manifests; the caller's to change."""
    return copy.deepcopy(list(_rendered(DEPLOY / "overlays" / name)))


def composed(folder: Path, base: str, components: Sequence[str]) -> list[Manifest]:
    """An overlay of a user's own: `base`, a path under deploy/, with components, written to `folder`."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "tandem",
        "resources": [f"../../{base}"],
        "components": [f"../../components/{name}" for name in components],
    }
    return own_overlay(folder, kustomization)


def own_overlay(folder: Path, kustomization: dict[str, Any]) -> list[Manifest]:
    """What becomes of a kustomization that stands beside those in deploy/overlays; it is written to `folder`.

    Folders that it names and that lie in `folder` are its own.
    """
    moved = {
        key: [
            path if (folder / path).is_dir() else os.path.relpath(DEPLOY / "overlays/mine" / path, folder)
            for path in paths
        ]
        for key, paths in kustomization.items()
        if key in {"resources", "components"}
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization | moved))
    return copy.deepcopy(list(_rendered(folder)))


def of_kind(manifests: Iterable[Manifest], *kinds: str) -> list[Manifest]:
    """Those of the kinds given."""
    return [each for each in manifests if each["kind"] in kinds]


def named(manifests: Iterable[Manifest], kind: str, name: str) -> Manifest:
    """The one of this kind and name."""
    (found,) = (each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether labels satisfy a selector by equality."""
    return selector.items() <= labels.items()


def pod_labels(workload: Manifest) -> dict[str, str]:
    """Labels of a workload's pods."""
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


@functools.cache
def _rendered(folder: Path) -> tuple[Manifest, ...]:
    command = [program("kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))
