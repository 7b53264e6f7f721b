"""The chart makes what the kustomize overlays make."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

import tandem
from tests.deploy.chart import CHART, notes, rendered, values
from tests.deploy.manifests import Manifest, composed, named, of_kind, overlay
from tests.deploy.pods import container, containers
from tests.deploy.test_schemas import OLDEST, VERSIONS, check
from tests.deploy.test_workloads import security_complaints
from tests.programs import program
from tests.scripts import load_script

Identity = tuple[str, str]
DASHBOARD = ("ConfigMap", "tandem-dashboard")
ON = {"enabled": True}
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def normal(manifests: list[Manifest]) -> dict[Identity, Any]:
    """By kind and name; without the hashes in names of ConfigMaps and the annotations that stand in their place."""
    hashes = {each["metadata"]["name"]: _unhashed(each["metadata"]["name"]) for each in of_kind(manifests, "ConfigMap")}
    text = json.dumps(manifests)
    for name, plain in hashes.items():
        text = text.replace(f'"{name}"', f'"{plain}"')
    found = {}
    for each in json.loads(text):
        if each["kind"] == "Deployment":
            each["spec"]["template"]["metadata"].pop("annotations", None)
            each["spec"]["template"]["spec"]["volumes"].sort(key=lambda volume: volume["name"])
            for spec in each["spec"]["template"]["spec"]["containers"]:
                spec.get("env", []).sort(key=lambda entry: entry["name"])
        found[each["kind"], each["metadata"]["name"]] = each
    return found


def _unhashed(name: str) -> str:
    return re.sub(r"-[a-z0-9]{10}$", "", name)


@pytest.mark.parametrize(
    ("files", "changes", "components"),
    [
        ((), {}, []),
        ((), {"insecure": True}, ["insecure"]),
        (("values-gpu.yaml",), {}, ["gpu", "model-claim"]),
        (("values-gpu.yaml",), {"insecure": True}, ["gpu", "model-claim", "insecure"]),
        ((), {"elastic": {"replicas": 2}}, ["elastic"]),
        (("values-gpu.yaml",), {"elastic": {"replicas": 2}}, ["elastic", "gpu", "model-claim"]),
        ((), {"monitoring": ON, "autoscaling": {"kind": "hpa"}}, ["monitoring", "autoscale-hpa"]),
        ((), {"monitoring": ON, "autoscaling": {"kind": "keda"}}, ["monitoring", "autoscale-keda"]),
        ((), {"monitoring": ON, "insecure": True}, ["monitoring", "insecure"]),
        (
            (),
            {"elastic": {"replicas": 2}, "autoscaling": {"kind": "hpa"}},
            ["elastic", "autoscale-hpa", "autoscale-hpa-elastic"],
        ),
        (
            (),
            {"elastic": {"replicas": 2}, "autoscaling": {"kind": "keda"}},
            ["elastic", "autoscale-keda", "autoscale-keda-elastic"],
        ),
    ],
    ids=str,
)
def test_the_chart_renders_the_same_objects_as_kustomize(
    tmp_path: Path, files: tuple[str, ...], changes: dict[str, Any], components: list[str]
) -> None:
    assert_alike(rendered(tmp_path, values(*files, **changes)), composed(tmp_path, "base", components))


def test_without_replicas_of_static_roles_the_chart_is_the_overlay_of_elastic_workers(tmp_path: Path) -> None:
    replicas = {"router": 1, "prefill": 0, "decode": 0, "elastic": 2}
    given = values(**{role: {"replicas": count} for role, count in replicas.items()})
    assert_alike(rendered(tmp_path, given), overlay("elastic"))


def assert_alike(of_the_chart: list[Manifest], of_kustomize: list[Manifest]) -> None:
    ours, theirs = normal(of_the_chart), normal(of_kustomize)
    theirs.pop(DASHBOARD, None)  # `kubectl apply -k deploy/grafana` brings it
    assert ours.keys() == theirs.keys()
    for identity, manifest in theirs.items():
        assert ours[identity] == manifest, identity


def test_values_reach_their_places(tmp_path: Path) -> None:
    own = {"TANDEM_MAX_SEQS": 8}
    given = values(
        image={"worker": {"repository": "registry.example.com/worker", "tag": "7"}},
        imagePullSecrets=["pull"],
        options={"TANDEM_MODEL": "/models/model", "TANDEM_DTYPE": "float32"},
        model={"image": "registry.example.com/model:1"},
        decode={
            "replicas": 5,
            "options": own,
            "nodeSelector": {"pool": "big"},
            "resources": {"limits": {"memory": "9Gi"}},
        },
    )
    manifests = rendered(tmp_path, given, "other")
    assert {each["metadata"]["namespace"] for each in manifests} == {"other"}
    decode, prefill = container(manifests, "decode"), container(manifests, "prefill")
    assert decode.workload["spec"]["replicas"] == 5
    assert (decode.spec["image"], decode.pod["imagePullSecrets"]) == (
        "registry.example.com/worker:7",
        [{"name": "pull"}],
    )
    assert decode.pod["nodeSelector"] == {"pool": "big"}
    assert "nodeSelector" not in prefill.pod
    assert decode.spec["resources"]["limits"] == {"cpu": "2", "memory": "9Gi"}
    assert [each.config().max_seqs for each in (decode, prefill)] == [8, 0]  # type: ignore[union-attr]
    assert {each.config().model for each in containers(manifests)} == {"/models/model"}
    volume = next(each for each in decode.pod["volumes"] if each["name"] == "model")
    assert volume["image"]["reference"] == "registry.example.com/model:1"


def test_what_pods_have_beside_the_chart_s_own_comes_as_it_is_given(tmp_path: Path) -> None:
    secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token", "optional": True}}}
    disk = {"name": "disk", "hostPath": {"path": "/mnt/nvme", "type": "Directory"}}
    mount = {"name": "disk", "mountPath": "/disk", "readOnly": False}
    claim = {"name": "gpu", "resourceClaimTemplateName": 'odd "name": #'}
    own = {"extraEnv": [secret], "volumes": [disk], "volumeMounts": [mount], "resourceClaims": [claim]}
    claimed = {"limits": {"memory": "9Gi", "nvidia.com/gpu": None}, "claims": [{"name": "gpu"}]}
    given = values(router={"extraEnv": [secret]}, elastic={"replicas": 1, "resources": claimed, **own})
    manifests = rendered(tmp_path, given)
    elastic, router = container(manifests, "elastic"), container(manifests, "router")
    assert router.spec["env"] == [secret]
    assert secret in elastic.spec["env"]
    assert disk in elastic.pod["volumes"]
    assert mount in elastic.spec["volumeMounts"]
    assert elastic.pod["resourceClaims"] == [claim]
    assert elastic.spec["resources"]["claims"] == [{"name": "gpu"}]
    assert "resourceClaims" not in router.pod


def test_autoscalers_follow_the_values_in_their_own_namespace(tmp_path: Path) -> None:
    own = {"maxReplicas": 3, "kvPoolUsage": 0.55, "queuedPromptTokens": 1_000_000, "prometheus": "http://p.m:9"}
    for kind, threshold in (("hpa", "averageValue"), ("keda", "threshold")):
        manifests = rendered(tmp_path, values(elastic={"replicas": 1}, autoscaling={"kind": kind, **own}), "other")
        scaler = named(manifests, {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[kind], "tandem-elastic")
        text = json.dumps(scaler)
        assert re.findall(rf'"{threshold}": "([^"]*)"', text) == ["0.55", "1000000"]
        assert 3 in scaler["spec"].values()
        assert '"tandem\\"' not in text  # a namespace that a query names is this one
        deployment = named(manifests, "Deployment", "tandem-elastic")
        assert "replicas" not in deployment["spec"]
        check(scaler, OLDEST)


@pytest.mark.parametrize("files", [(), ("values-gpu.yaml",)])
def test_the_chart_s_own_values_pass_its_schema(files: tuple[str, ...]) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(values(*files))


@pytest.mark.parametrize(
    "changes",
    [
        {"replicas": 3},
        {"decode": {"replica": 3}},
        {"decode": {"replicas": "three"}},
        {"decode": {"nodeSelector": {"gpu": True}}},
        {"decode": {"extraEnv": {"HF_TOKEN": "x"}}},
        {"decode": {"volumeMounts": [{"name": "disk"}]}},
        {"options": {"kv-memory": "90%"}},
        {"options": {"TANDEM_DEVICE": ["cuda"]}},
        {"autoscaling": {"kind": "vpa"}},
        {"autoscaling": {"kvPoolUsage": 70}},
        {"insecure": "yes"},
        {"model": {"claim": "mine", "image": "registry.example.com/model:1"}},
    ],
    ids=str,
)
def test_values_that_would_do_nothing_or_harm_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate(values(**changes))


def test_the_notes_say_how_to_call_it_and_what_is_missing(tmp_path: Path) -> None:
    secure, open_to_all = (notes(tmp_path, values(insecure=insecure), "other") for insecure in (False, True))
    service = named(rendered(tmp_path, values()), "Service", "tandem-router")
    for text in (secure, open_to_all):
        assert "-n other port-forward service/tandem-router" in text
        assert all(str(port["port"]) in text for port in service["spec"]["ports"])
    assert "tandem-tokens" in secure
    assert "tandem-tokens" not in open_to_all


def test_pods_roll_when_options_change(tmp_path: Path) -> None:
    def annotations(**options: str) -> list[Any]:
        deployments = of_kind(rendered(tmp_path, values(options=options)), "Deployment")
        return [each["spec"]["template"]["metadata"]["annotations"] for each in deployments]

    assert annotations() == annotations()
    for plain, changed in zip(annotations(), annotations(TANDEM_MODEL='a: "b" #'), strict=True):
        assert plain != changed
        assert changed["tandem/TANDEM_MODEL"] == 'a: "b" #'


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"insecure": True},
        {"model": {"claim": "mine"}},
        {"monitoring": {"enabled": True, "labels": {"release": "prometheus"}}, "autoscaling": {"kind": "keda"}},
    ],
    ids=str,
)
def test_what_it_renders_is_valid_and_restricted(tmp_path: Path, changes: dict[str, Any]) -> None:
    manifests = rendered(tmp_path, values(**changes))
    for manifest in manifests:
        check(manifest, OLDEST)
        check(manifest, VERSIONS[-1])
    for each in containers(manifests):
        assert security_complaints(each) == []


def test_templates_use_nothing_that_helm_adds_to_go() -> None:
    known = {"and", "define", "else", "end", "eq", "if", "or", "not", "null", "printf", "range", "template"}
    for template in (CHART / "templates").iterdir():
        for action in re.findall(r"\{\{-? *(.*?) *\}\}", template.read_text()):
            words = re.findall(r"(?<![\w.$\"%])[a-zA-Z]\w*", re.sub(r'"[^"]*"|/\*.*\*/', "", action))
            assert set(words) <= known, action


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == tandem.__version__
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"


@pytest.fixture
def script() -> ModuleType:
    """What makes the templates."""
    return load_script(".ci/checks/helm_chart.py")


def test_a_template_that_is_not_the_base_s_is_noticed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program("kubectl")
    monkeypatch.setattr(sys, "argv", ["helm_chart.py"])
    assert script.main() == 0
    monkeypatch.setattr(script, "TEMPLATES", tmp_path)
    assert script.main() == 1
