"""What the kubelet asks of a container and how it ends one, against what the processes answer and need."""

from __future__ import annotations

from typing import Any

import pytest

from bench.scaling import MIN_READY_S
from shell.config import RouterConfig
from tests.deploy.manifests import OVERLAYS, named, overlay
from tests.deploy.pods import Container, containers
from worker.serving.process import STALL_S

EVERY_OVERLAY = pytest.mark.parametrize("name", OVERLAYS)
LIVENESS, READINESS = "/livez", "/readyz"
"""Of the admin port."""
CLOSING_MARGIN_S = 15
"""What a process may take after its drain: the last flush, transfers and watchers that end, the engine's memory."""


def asked(each: Container, probe: dict[str, Any]) -> tuple[int, str]:
    """Port and path that a probe asks, by HTTP. The kubelet has no certificate to show, and checks none."""
    request = probe["httpGet"]
    ports = {port["name"]: port["containerPort"] for port in each.spec["ports"]}
    security = each.config().security
    assert (request["scheme"] == "HTTPS") == (security.tls_cert is not None)
    assert security.tls_client_ca is None
    return ports[request["port"]], request["path"]


def complaints(each: Container) -> list[str]:
    config = each.config()
    assert config.admin_listen is not None
    port = int(config.admin_listen.rpartition(":")[2])
    wanted = {"startupProbe": LIVENESS, "readinessProbe": READINESS, "livenessProbe": LIVENESS}
    return [
        f"{kind} asks {asked(each, each.probes[kind])}, not {(port, service)}"
        for kind, service in wanted.items()
        if asked(each, each.probes[kind]) != (port, service)
    ]


@EVERY_OVERLAY
def test_probes_ask_each_process_at_its_port_for_life_and_readiness_apart(name: str) -> None:
    for each in containers(overlay(name)):
        assert complaints(each) == []


@EVERY_OVERLAY
def test_a_process_is_given_up_later_than_it_is_taken_out_of_use(name: str) -> None:
    for each in containers(overlay(name)):
        readiness, liveness = each.probes["readinessProbe"], each.probes["livenessProbe"]
        assert patience_s(readiness) < patience_s(liveness) < STALL_S


def patience_s(probe: dict[str, Any]) -> int:
    return int(probe["periodSeconds"]) * int(probe["failureThreshold"])


@EVERY_OVERLAY
def test_a_worker_has_half_an_hour_to_load_and_a_rollout_waits_for_it(name: str) -> None:
    for each in containers(overlay(name)):
        start_s = patience_s(each.probes["startupProbe"])
        assert start_s >= (120 if each.name == "router" else 1800)
        assert each.workload["spec"]["progressDeadlineSeconds"] > start_s + each.workload["spec"]["minReadySeconds"]


@EVERY_OVERLAY
def test_a_rollout_leaves_callers_the_time_to_come_back_that_the_rolling_restart_under_load_gives_them(
    name: str,
) -> None:
    for each in containers(overlay(name)):
        if each.name == "router":
            assert each.workload["spec"]["minReadySeconds"] >= MIN_READY_S


@EVERY_OVERLAY
def test_a_container_may_take_the_time_that_its_drain_takes(name: str) -> None:
    for each in containers(overlay(name)):
        assert shortfall_s(each) <= 0


def shortfall_s(each: Container) -> float:
    needed_s = each.pre_stop_s + each.config().drain_grace_s + CLOSING_MARGIN_S
    return needed_s - float(each.pod["terminationGracePeriodSeconds"])


@EVERY_OVERLAY
def test_routers_wait_before_they_stop_because_clients_find_them_by_service(name: str) -> None:
    manifests = overlay(name)
    assert named(manifests, "Service", "tandem-router")
    for each in containers(manifests):
        assert (each.pre_stop_s >= 5) == isinstance(each.config(), RouterConfig)


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "gpu-same-pod"])  # which stops its workers last
def test_a_stream_outlives_the_drain_of_its_workers(name: str) -> None:
    drains = {each.name: each.config().drain_grace_s for each in containers(overlay(name))}
    assert drains.pop("router") > max(drains.values())
