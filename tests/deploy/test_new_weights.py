"""Workers of new weights beside those that serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from shell.config import WorkerConfig
from tests.deploy.manifests import (
    BESIDE_ANOTHER,
    Manifest,
    composed,
    matches,
    named,
    of_kind,
    overlay,
    pod_labels,
)
from tests.deploy.network import Flow, Pod, admits
from tests.deploy.pods import containers

EVERY_POOL = pytest.mark.parametrize("base", ["elastic", "cpu", "gpu", "gpu-pools", "gpu-nixl"])
OF_WORKERS = {"ConfigMap", "Deployment", "PodDisruptionBudget"}


def both(base: str, folder: Path) -> tuple[list[Manifest], list[Manifest]]:
    """What serves, and what comes beside it."""
    old, new = folder / "old", folder / "new"
    old.mkdir()
    new.mkdir()
    model = [] if base.startswith("gpu") else ["model-claim"]
    name = f"overlays/{base}"
    return composed(old, name, model), composed(new, name, [*model, "new-weights"])


@EVERY_POOL
def test_nothing_but_workers_comes_and_nothing_that_is_there_changes(base: str, tmp_path: Path) -> None:
    serving, coming = both(base, tmp_path)
    assert {each["kind"] for each in coming} == OF_WORKERS
    ours, theirs = ({(each["kind"], each["metadata"]["name"]) for each in each_of} for each_of in (serving, coming))
    assert not ours & theirs
    assert sorted(each.name for each in containers(coming)) == sorted(
        each.name for each in containers(serving) if each.name != "router"
    )


@EVERY_POOL
def test_each_takes_its_own_pods_for_its_own(base: str, tmp_path: Path) -> None:
    serving, coming = both(base, tmp_path)
    workloads = of_kind([*serving, *coming], "Deployment")
    for owner in of_kind([*serving, *coming], "Deployment", "PodDisruptionBudget"):
        selector = owner["spec"]["selector"]["matchLabels"]
        owned = [each["metadata"]["name"] for each in workloads if matches(selector, pod_labels(each))]
        assert owned == [owner["metadata"]["name"]]


@EVERY_POOL
def test_they_differ_in_the_folder_of_the_model_alone(base: str, tmp_path: Path) -> None:
    serving, coming = both(base, tmp_path)
    configs = {each.name: each.config() for each in containers(serving)}
    for each in containers(coming):
        ours, theirs = each.config(), configs[each.name]
        assert isinstance(ours, WorkerConfig)
        assert isinstance(theirs, WorkerConfig)
        assert (ours.model, theirs.model) == ("/models/next/model", "/models/model")
        assert Path(ours.model).name == Path(theirs.model).name  # else routers take it for another model
        assert (ours.router, ours.transport, ours.device) == (theirs.router, theirs.transport, theirs.device)
        assert ours.worker_id != theirs.worker_id


@EVERY_POOL
def test_policies_take_them_for_workers_of_their_role(base: str, tmp_path: Path) -> None:
    serving, coming = both(base, tmp_path)
    policies = of_kind(serving, "NetworkPolicy")
    home = {"kubernetes.io/metadata.name": "tandem"}
    router = Pod("router", "tandem", pod_labels(named(serving, "Deployment", "tandem-router")), home)
    for each in containers(coming):
        worker = Pod(each.name, "tandem", each.labels, home)
        port = next(number for name, number in each.ports.items() if name.startswith("grpc"))
        assert admits(policies, Flow(worker, router, 50051))
        assert admits(policies, Flow(router, worker, port))


def test_the_overlay_brings_more_workers_than_serve() -> None:
    serving, coming = overlay("elastic"), overlay(BESIDE_ANOTHER)
    old, new = (
        named(manifests, "Deployment", name)["spec"]["replicas"]
        for manifests, name in ((serving, "tandem-elastic"), (coming, "tandem-elastic-next"))
    )
    assert new > old
