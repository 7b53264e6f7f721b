"""Ways for a model to get into pods; and what downloads one."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from models.files.checkpoint import resolve_model
from models.preflight import read_servable
from router.tokenization import Tokenization
from tests.deploy.manifests import Manifest, composed, named, of_kind

MODEL = "/models/model"
WAYS = (["model-claim"], ["model-volume"], ["model-volume", "model-fetch"], ["model-image"])


def volumes(manifest: Manifest) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in manifest["spec"]["template"]["spec"]["volumes"]}


def options(manifests: list[Manifest]) -> dict[str, str]:
    (found,) = (each for each in of_kind(manifests, "ConfigMap") if "-options-" in each["metadata"]["name"])
    return dict(found["data"])


@pytest.mark.parametrize("components", WAYS, ids="+".join)
def test_every_pod_serves_the_folder_from_one_volume_that_it_cannot_write_to(
    tmp_path: Path, components: list[str]
) -> None:
    manifests = composed(tmp_path, "overlays/cpu", components)
    assert options(manifests)["TANDEM_MODEL"] == MODEL
    mounted = [volumes(each)["model"] for each in of_kind(manifests, "Deployment")]
    assert len(mounted) == 3
    assert all(each == mounted[0] and "emptyDir" not in each for each in mounted)
    assert mounted[0].get("image") or mounted[0]["persistentVolumeClaim"]["readOnly"]


def test_an_existing_claim_is_not_made_again(tmp_path: Path) -> None:
    assert of_kind(composed(tmp_path, "overlays/cpu", ["model-claim"]), "PersistentVolumeClaim") == []


def restricted(pod: dict[str, Any], container: dict[str, Any]) -> bool:
    own = container["securityContext"]
    return (
        pod["securityContext"]["runAsNonRoot"]
        and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        and own["readOnlyRootFilesystem"]
        and own["allowPrivilegeEscalation"] is False
        and own["capabilities"] == {"drop": ["ALL"]}
        and "memory" in container["resources"]["limits"]
    )


def test_the_job_writes_to_the_claim_that_pods_read(tmp_path: Path) -> None:
    manifests = composed(tmp_path, "overlays/cpu", ["model-volume", "model-fetch"])
    job = named(manifests, "Job", "tandem-fetch")
    pod = job["spec"]["template"]["spec"]
    assert restricted(pod, pod["containers"][0])
    assert pod["automountServiceAccountToken"] is False
    claim = named(manifests, "PersistentVolumeClaim", volumes(job)["model"]["persistentVolumeClaim"]["claimName"])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    worker = named(manifests, "Deployment", "tandem-decode")["spec"]["template"]["spec"]["containers"][0]
    assert pod["containers"][0]["image"] == worker["image"]


@pytest.fixture
def fetch(tmp_path: Path) -> dict[str, Any]:
    """The Job's container."""
    manifests = composed(tmp_path, "overlays/cpu", ["model-volume", "model-fetch"])
    return dict(named(manifests, "Job", "tandem-fetch")["spec"]["template"]["spec"]["containers"][0])


HUB = """#!/bin/sh
echo "$@" >> "$CALLS"
test -z "$FAIL" || exit 1
while [ "$1" != --local-dir ]; do shift; done
mkdir -p "$2" && echo weights > "$2/model.safetensors"
"""
"""Stands in for the hub's own client."""


def run(container: dict[str, Any], folder: Path, *, fail: bool = False, repository: str = "owner/name") -> int:
    """Runs a container's script with `folder` in the place of /models."""
    hub = folder / "bin/hf"
    hub.parent.mkdir(parents=True, exist_ok=True)
    hub.write_text(HUB)
    hub.chmod(0o755)
    (script,) = container["args"]
    environment = {
        "PATH": f"{hub.parent}:/usr/bin:/bin",
        "CALLS": str(folder / "calls"),
        "FAIL": "1" if fail else "",
        "MODEL_REPOSITORY": repository,
        "MODEL_REVISION": "main",
    }
    command = [*container["command"], script.replace("/models", str(folder))]
    return subprocess.run(command, env=environment, cwd=folder, check=False, timeout=20).returncode


def test_a_model_shows_under_its_name_once_it_is_whole_and_is_fetched_once(
    fetch: dict[str, Any], tmp_path: Path
) -> None:
    assert run(fetch, tmp_path, fail=True) != 0
    assert not (tmp_path / "model").exists()
    assert [run(fetch, tmp_path) for _ in range(2)] == [0, 0]
    assert (tmp_path / "model/model.safetensors").read_text() == "weights\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert calls[0].startswith("download owner/name --revision main --local-dir ")


def test_what_was_begun_of_another_model_is_not_gone_on_with(fetch: dict[str, Any], tmp_path: Path) -> None:
    assert run(fetch, tmp_path, fail=True, repository="owner/other") != 0
    (tmp_path / ".fetching/other.safetensors").touch()
    assert run(fetch, tmp_path) == 0
    assert not (tmp_path / "model/other.safetensors").exists()


def test_another_model_is_not_taken_for_the_one_that_is_wanted(fetch: dict[str, Any], tmp_path: Path) -> None:
    assert run(fetch, tmp_path, repository="owner/other") == 0
    assert run(fetch, tmp_path) != 0


@pytest.mark.parametrize("way", ["model-claim", "model-image"])
def test_routers_fetch_their_files_into_a_folder_of_their_own(tmp_path: Path, way: str) -> None:
    manifests = composed(tmp_path, "overlays/cpu", [way, "router-files"])
    router = named(manifests, "Deployment", "tandem-router")
    assert volumes(router)["model"] == {"name": "model", "emptyDir": {"sizeLimit": "256Mi"}}
    assert "emptyDir" not in volumes(named(manifests, "Deployment", "tandem-decode"))["model"]
    pod = router["spec"]["template"]["spec"]
    (files,) = pod["initContainers"]
    assert restricted(pod, files)
    assert files["envFrom"][0]["configMapRef"]["name"].startswith("tandem-router-files-")
    assert run(files, tmp_path) == 0
    assert f"--local-dir {tmp_path}/model" in (tmp_path / "calls").read_text()


def test_a_router_serves_from_the_files_that_are_fetched_for_it(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    router = named(composed(overlay, "overlays/cpu", ["model-claim", "router-files"]), "Deployment", "tandem-router")
    script = router["spec"]["template"]["spec"]["initContainers"][0]["args"][0]
    patterns = [word.strip("'") for word in script.split() if word.startswith("'*")]
    assert patterns
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (each for pattern in patterns for each in resolve_model("demo").glob(pattern)):
        (folder / file.name).write_bytes(file.read_bytes())
    whole, part = read_servable("demo").checkpoint, read_servable(str(folder)).checkpoint
    assert not list(folder.glob("*.safetensors"))
    assert part.config_fingerprint == whole.config_fingerprint
    tokens = [asyncio.run(Tokenization.load(each).encode_text("Once upon a time")) for each in (folder, whole.path)]
    assert tokens[0] == tokens[1]
