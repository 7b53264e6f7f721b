"""Manifests against the processes that they start: arguments, ports, names, secrets, rights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import tandem
from cli.serve import fleet_devices
from shell.config import DecodeConfig, ElasticConfig, PrefillConfig, RouterConfig, WorkerConfig
from tandem.option_values import Share
from tandem.security.exposure import check_exposure
from tests.deploy.manifests import (
    DEPLOY,
    OVERLAYS,
    Manifest,
    composed,
    matches,
    named,
    of_kind,
    overlay,
    pod_labels,
)
from tests.deploy.pods import POD_IP, Container, container, containers, quantity

EVERY_OVERLAY = pytest.mark.parametrize("name", OVERLAYS)
WHOLE_SERVERS = {"gpu-same-pod"}
"""Overlays whose pods are whole servers."""
EVERY_OVERLAY_OF_POOLS = pytest.mark.parametrize("name", sorted(set(OVERLAYS) - WHOLE_SERVERS))
ELASTIC = {"elastic", "elastic-hpa", "elastic-keda", "gpu"}
"""Overlays without static roles."""
INSECURE = {"dev"}
PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
_WORD = r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?"
LABEL = re.compile(rf"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/)?{_WORD}=(?:{_WORD})?")


def port_of(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


def listening_ports(each: Container) -> set[int]:
    config = each.config()
    ports = {port_of(config.listen), port_of(config.admin_listen)}
    if isinstance(config, RouterConfig):
        ports.add(port_of(config.http))
    return ports | {config.kv_port} if isinstance(config, DecodeConfig) else ports


@EVERY_OVERLAY
def test_every_container_starts_a_process_that_accepts_its_arguments_and_environment(name: str) -> None:
    configs = [config for each in containers(overlay(name)) for config in each.configs()]
    workers = {ElasticConfig} if name in ELASTIC else {PrefillConfig, DecodeConfig}
    assert {type(config) for config in configs} == {RouterConfig, *workers}
    assert len({config.model for config in configs}) == 1


@EVERY_OVERLAY
def test_what_is_listened_on_is_what_is_declared(name: str) -> None:
    for each in containers(overlay(name)):
        assert listening_ports(each) == set(each.ports.values()), each.name
        assert each.config().listen.startswith("0.0.0.0:")


@EVERY_OVERLAY
def test_workers_register_through_a_service_that_shows_routers_before_they_are_ready(name: str) -> None:
    manifests = overlay(name)
    router = container(manifests, "router")
    for each in containers(manifests):
        config = each.config()
        if isinstance(config, WorkerConfig):
            (address,) = config.router
            service = named(manifests, "Service", address.rpartition(":")[0])["spec"]
            assert service["clusterIP"] == "None"  # the name stands for every router
            assert service["publishNotReadyAddresses"]  # else none gets ready: readiness needs workers
            assert matches(service["selector"], router.labels)
            assert port_of(address) == port_of(router.config().listen)


@EVERY_OVERLAY_OF_POOLS
def test_workers_tell_the_pod_s_address_and_a_name_of_their_own(name: str) -> None:
    workers = [each for each in containers(overlay(name)) if isinstance(each.config(), WorkerConfig)]
    configs = [each.config() for each in workers]
    assert [c.advertise for c in configs] == [f"{POD_IP}:{port_of(c.listen)}" for c in configs]  # type: ignore[union-attr]
    assert len({config.worker_id for config in configs}) == len(workers) == (1 if name in ELASTIC else 2)  # type: ignore[union-attr]


def test_an_elastic_worker_s_pod_is_a_decode_worker_s_but_for_its_command_and_its_names(tmp_path: Path) -> None:
    manifests = composed(tmp_path, "base", ["elastic"])
    elastic, decode = (container(manifests, name).workload for name in ("elastic", "decode"))
    arguments = container(manifests, "elastic").spec["args"]
    assert arguments[0] == "worker"
    arguments[0] = "decode"
    assert json.loads(json.dumps(elastic).replace("elastic", "decode")) == decode


@EVERY_OVERLAY
def test_every_service_selects_pods_and_leads_to_the_port_of_its_name(name: str) -> None:
    manifests = overlay(name)
    for service in of_kind(manifests, "Service"):
        selected = [each for each in containers(manifests) if matches(service["spec"]["selector"], each.labels)]
        for port in service["spec"]["ports"]:
            numbers = [each.ports[port["targetPort"]] for each in selected if port["targetPort"] in each.ports]
            assert numbers, service["metadata"]["name"]
            if service["spec"].get("clusterIP") == "None":  # nothing translates ports on the way to a headless one
                assert set(numbers) == {port["port"]}


@EVERY_OVERLAY
def test_workloads_select_their_own_pods_and_no_others(name: str) -> None:
    workloads = of_kind(overlay(name), "Deployment")
    for workload in workloads:
        selector = workload["spec"]["selector"]["matchLabels"]
        selected = [each["metadata"]["name"] for each in workloads if matches(selector, pod_labels(each))]
        assert selected == [workload["metadata"]["name"]]
        for spread in workload["spec"]["template"]["spec"]["topologySpreadConstraints"]:
            assert spread["labelSelector"]["matchLabels"] == selector


@EVERY_OVERLAY
def test_every_pod_has_one_disruption_budget_that_lets_one_go(name: str) -> None:
    manifests = overlay(name)
    budgets = of_kind(manifests, "PodDisruptionBudget")
    for workload in of_kind(manifests, "Deployment"):
        found = [b["spec"] for b in budgets if matches(b["spec"]["selector"]["matchLabels"], pod_labels(workload))]
        assert [spec["maxUnavailable"] for spec in found] == [1], workload["metadata"]["name"]
    for budget in budgets:
        selector = budget["spec"]["selector"]["matchLabels"]
        assert any(matches(selector, pod_labels(w)) for w in of_kind(manifests, "Deployment"))


@EVERY_OVERLAY
def test_pods_meet_the_restricted_pod_security_standard_and_write_nowhere_but_to_tmp(name: str) -> None:
    for each in containers(overlay(name)):
        assert security_complaints(each) == []


def security_complaints(each: Container) -> list[str]:
    pod, own = each.pod, each.spec.get("securityContext", {})
    context = pod.get("securityContext", {}) | own
    writable = {v["name"] for v in each.spec["volumeMounts"] if not v.get("readOnly")}
    allowed = {
        "runs as root": context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0,
        "has a writable root": own.get("readOnlyRootFilesystem") is True,
        "may gain rights": own.get("allowPrivilegeEscalation") is False and not own.get("privileged"),
        "keeps capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        "has no seccomp profile": context.get("seccompProfile") == {"type": "RuntimeDefault"},
        "shares the node": not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
        "mounts the node": not any("hostPath" in volume for volume in pod["volumes"]),
        "has the API's token": pod.get("automountServiceAccountToken") is False and "serviceAccountName" in pod,
        "writes elsewhere": writable == {"tmp"},
        "mounts what is not there": {v["name"] for v in each.spec["volumeMounts"]}
        <= {v["name"] for v in pod["volumes"]},
        "may fill the node's disk": all("sizeLimit" in v["emptyDir"] for v in pod["volumes"] if v["name"] == "tmp"),
        "has no memory limit": "memory" in each.spec["resources"]["limits"],
        "takes a rolling tag": not re.search(r":latest$|^[^:]+$", each.spec["image"]),
    }
    return [complaint for complaint, holds in allowed.items() if not holds]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda each: each.spec["securityContext"].update(readOnlyRootFilesystem=False), "has a writable root"),
        (lambda each: each.spec["securityContext"].update(runAsUser=0), "runs as root"),
        (lambda each: each.spec["securityContext"]["capabilities"].update(add=["NET_RAW"]), "keeps capabilities"),
        (lambda each: each.workload["spec"]["template"]["spec"].update(hostIPC=True), "shares the node"),
        (lambda each: each.spec["volumeMounts"][1].pop("readOnly"), "writes elsewhere"),
        (lambda each: each.spec.update(image="tandem-router:latest"), "takes a rolling tag"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pod_below_the_standard_is_noticed(spoil: object, complaint: str) -> None:
    router = container(overlay("cpu"), "router")
    spoil(router)  # type: ignore[operator]
    assert security_complaints(router) == [complaint]


@EVERY_OVERLAY
def test_only_the_overlay_for_trying_out_is_insecure(name: str) -> None:
    for each in containers(overlay(name)):
        security = each.config().security
        assert security.insecure == (name in INSECURE)
        has_both = security.tls_cert is not None and security.token_file is not None
        assert has_both != security.insecure


@EVERY_OVERLAY
def test_every_port_may_be_opened_with_the_security_given(name: str) -> None:
    for each in containers(overlay(name)):
        check_ports(each)


def check_ports(each: Container) -> None:
    config = each.config()
    check_exposure(config.security, config.ports)


@EVERY_OVERLAY
def test_every_file_that_an_option_names_lies_on_a_mounted_volume(name: str) -> None:
    for each in containers(overlay(name)):
        config = each.config()
        mounts = [Path(mount["mountPath"]) for mount in each.spec["volumeMounts"]]
        security = config.security
        files = [security.tls_cert, security.tls_key, security.tls_ca, security.token_file]
        files += [] if config.model == "demo" else [config.model]
        for file in filter(None, files):
            assert any(mount in Path(file).parents for mount in mounts), f"{each.name}: {file}"


@EVERY_OVERLAY
def test_every_secret_needed_is_in_the_documents_with_its_keys(name: str) -> None:
    page = (DEPLOY.parent / "docs/kubernetes.md").read_text()
    for each in containers(overlay(name)):
        for volume in each.pod["volumes"]:
            if "secret" in volume and not volume["secret"].get("optional"):
                assert f"`{volume['secret']['secretName']}`" in page
                assert all(f"`{item['key']}`" in page for item in volume["secret"].get("items", []))


@EVERY_OVERLAY
def test_every_config_map_and_claim_needed_is_there(name: str) -> None:
    manifests = overlay(name)
    for each in containers(manifests):
        for source in each.spec["envFrom"]:
            assert named(manifests, "ConfigMap", source["configMapRef"]["name"])
        for volume in each.pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]
                assert claim["readOnly"]
                assert named(manifests, "PersistentVolumeClaim", claim["claimName"])


@EVERY_OVERLAY
def test_images_are_those_that_the_dockerfiles_build_at_this_version(name: str) -> None:
    for each in containers(overlay(name)):
        image, _, tag = each.spec["image"].partition(":")
        device = next((config.device for config in each.configs() if isinstance(config, WorkerConfig)), None)
        wanted = {
            None: ("tandem-router", tandem.__version__),
            "auto": ("tandem-worker", f"{tandem.__version__}-cpu"),
            "cuda": ("tandem-worker", f"{tandem.__version__}-cuda"),
        }
        assert (image, tag) == wanted[device]


@EVERY_OVERLAY
def test_a_worker_computes_on_as_many_threads_as_its_limit_has_cores(name: str) -> None:
    for each in containers(overlay(name)):
        threads = [config.threads for config in each.configs() if isinstance(config, WorkerConfig)]
        if threads:
            assert sum(filter(None, threads)) == quantity(each.spec["resources"]["limits"]["cpu"])


@EVERY_OVERLAY
def test_a_kv_pool_of_a_given_size_leaves_room_in_its_container(name: str) -> None:
    for each in containers(overlay(name)):
        pools = [config.kv_memory for config in each.configs() if isinstance(config, WorkerConfig)]
        sizes = [pool for pool in pools if isinstance(pool, int)]
        assert sum(sizes) < quantity(each.spec["resources"]["limits"]["memory"])


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name.startswith("gpu")])
def test_every_worker_on_a_gpu_has_one_for_itself_and_the_transport_that_the_overlay_says(name: str) -> None:
    for each in containers(overlay(name)):
        workers = [config for config in each.configs() if isinstance(config, WorkerConfig)]
        assert int(each.spec["resources"]["limits"].get("nvidia.com/gpu", 0)) == len(workers)
        assert {config.transport for config in workers} <= {"nixl" if name == "gpu-nixl" else "auto"}


@pytest.mark.parametrize("base", ["gpu", "gpu-pools"])
def test_a_claim_takes_the_place_of_a_device_plugin_s_gpu(tmp_path: Path, base: str) -> None:
    manifests = composed(tmp_path, f"overlays/{base}", ["gpu-claims"])
    template = named(manifests, "ResourceClaimTemplate", "tandem-gpu")["spec"]["spec"]
    assert [each["exactly"]["deviceClassName"] for each in template["devices"]["requests"]] == ["gpu.nvidia.com"]
    for each in containers(manifests):
        if isinstance(each.config(), WorkerConfig):
            (claim,) = each.pod["resourceClaims"]
            assert claim["resourceClaimTemplateName"] == "tandem-gpu"
            assert each.spec["resources"]["claims"] == [{"name": claim["name"]}]
            assert "nvidia.com/gpu" not in each.spec["resources"]["limits"]


def test_the_smallest_overlay_with_a_gpu_asks_for_one() -> None:
    gpus = [
        each.workload["spec"]["replicas"] * int(each.spec["resources"]["limits"].get("nvidia.com/gpu", 0))
        for each in containers(overlay("gpu"))
    ]
    assert sum(gpus) == 1


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name.startswith("gpu")])
def test_a_pool_on_a_gpu_is_a_share_of_it(name: str) -> None:
    pools = {
        config.kv_memory
        for each in containers(overlay(name))
        for config in each.configs()
        if isinstance(config, WorkerConfig)
    }
    # `tandem serve` shares out the whole of it by itself.
    assert pools == ({None} if name in WHOLE_SERVERS else {Share(90.0)})


def test_both_workers_of_a_whole_server_are_in_one_container_each_on_a_gpu_of_its_own() -> None:
    (each,) = containers(overlay("gpu-same-pod"))
    server = each.server()
    assert server is not None
    assert (server.num_prefill, server.num_decode) == (1, 1)
    plan = fleet_devices(server, ("GPU-a", "GPU-b"))
    assert [share.gpus[0] for share in (*plan.prefill, *plan.decode)] == ["GPU-a", "GPU-b"]


def test_a_whole_server_registers_nobody_from_outside() -> None:
    manifests = overlay("gpu-same-pod")
    names = {each["metadata"]["name"] for each in manifests}
    assert not names & {"tandem-prefill", "tandem-decode", "tandem-worker"}


@pytest.mark.parametrize(("base", "components"), [("gpu-nixl", []), ("gpu-pools", ["peer-ports", "insecure"])], ids=str)
def test_ports_that_libraries_pick_come_from_the_range_that_the_policy_admits(
    tmp_path: Path, base: str, components: list[str]
) -> None:
    manifests = composed(tmp_path, f"overlays/{base}", components)
    policy = named(manifests, "NetworkPolicy", "tandem-peers")["spec"]
    ((picked,), (reached,)) = (policy[way][0]["ports"] for way in ("ingress", "egress"))
    workers = [each for each in containers(manifests) if isinstance(each.config(), WorkerConfig)]
    assert len(workers) == 2
    for each in workers:
        (setting,) = each.pod["securityContext"]["sysctls"]
        assert setting["name"] == "net.ipv4.ip_local_port_range"
        assert setting["value"] == f"{picked['port']} {picked['endPort']}"
        assert not set(range(picked["port"], picked["endPort"] + 1)) & set(each.ports.values())
    assert picked == reached


def test_a_network_card_is_asked_for_where_the_page_says_so() -> None:
    page = (DEPLOY.parent / "docs/kubernetes.md").read_text()
    assert "`rdma/hca`" in page
    limits = [each.spec["resources"]["limits"] for each in containers(overlay("gpu-nixl")) if each.name != "router"]
    assert [each["rdma/hca"] for each in limits] == ["1", "1"]


@EVERY_OVERLAY
def test_names_of_ports_and_labels_are_ones_that_kubernetes_takes(name: str) -> None:
    assert name_complaints(overlay(name)) == []


def name_complaints(manifests: list[Manifest]) -> list[str]:
    """What the schemas cannot say."""
    wrong = [port for each in containers(manifests) for port in each.ports if not PORT_NAME.fullmatch(port)]
    for manifest in manifests:
        template = manifest["spec"].get("template", {}) if isinstance(manifest.get("spec"), dict) else {}
        labels = manifest["metadata"].get("labels", {}) | template.get("metadata", {}).get("labels", {})
        wrong += [f"{key}={value}" for key, value in labels.items() if not LABEL.fullmatch(f"{key}={value}")]
    return wrong
