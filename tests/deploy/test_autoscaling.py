"""Autoscalers against what they scale and what they measure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tandem.telemetry import metric_names
from tandem.telemetry.metric import Kind
from tests.deploy.manifests import DEPLOY, Manifest, named, of_kind, overlay
from tests.deploy.pods import containers

VARIANTS = {"autoscale-hpa": "HorizontalPodAutoscaler", "autoscale-keda": "ScaledObject"}
EVERY_VARIANT = pytest.mark.parametrize("name", VARIANTS)
METRICS = {metric.name: metric for metric in metric_names.ALL}
ADAPTER_RULES = DEPLOY / "components/autoscale-hpa/adapter-rules.yaml"


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """What both kinds say, in one form."""

    target: str
    least: int
    most: int
    behavior: dict[str, Any]
    metric: str
    threshold: str
    labels: dict[str, str]


def autoscalers(manifests: list[Manifest]) -> Iterator[Autoscaler]:
    for hpa in of_kind(manifests, "HorizontalPodAutoscaler"):
        spec = hpa["spec"]
        (pods,) = (each["pods"] for each in spec["metrics"])
        yield Autoscaler(
            spec["scaleTargetRef"]["name"],
            spec["minReplicas"],
            spec["maxReplicas"],
            spec["behavior"],
            pods["metric"]["name"],
            pods["target"]["averageValue"],
            {},
        )
    for scaled in of_kind(manifests, "ScaledObject"):
        spec = scaled["spec"]
        (trigger,) = spec["triggers"]
        found = re.fullmatch(r"sum\((\w+)\{(.*)\}\)", trigger["metadata"]["query"])
        assert found is not None
        yield Autoscaler(
            spec["scaleTargetRef"]["name"],
            spec["minReplicaCount"],
            spec["maxReplicaCount"],
            spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
            found[1],
            trigger["metadata"]["threshold"],
            dict(re.findall(r'(\w+)="([^"]*)"', found[2])),
        )


def role_of(each: Autoscaler) -> str:
    return each.target.removeprefix("tandem-")


@EVERY_VARIANT
def test_each_pool_has_an_autoscaler_of_its_own(name: str) -> None:
    manifests = overlay(name)
    found = list(autoscalers(manifests))
    assert sorted(each.target for each in found) == ["tandem-decode", "tandem-prefill"]
    assert len(of_kind(manifests, VARIANTS[name])) == len(found)


@EVERY_VARIANT
def test_the_number_of_replicas_is_left_to_the_autoscaler(name: str) -> None:
    manifests = overlay(name)
    for each in autoscalers(manifests):
        assert "replicas" not in named(manifests, "Deployment", each.target)["spec"]
        assert 2 <= each.least < each.most


@EVERY_VARIANT
def test_what_is_measured_is_a_gauge_that_the_pool_s_processes_have(name: str) -> None:
    for each in autoscalers(overlay(name)):
        metric = METRICS[each.metric]
        assert metric.kind is Kind.GAUGE
        assert role_of(each) in metric.on


@EVERY_VARIANT
def test_prefill_follows_queued_prompt_tokens_and_decode_the_use_of_its_pool(name: str) -> None:
    wanted = {
        "tandem-prefill": (metric_names.PREFILL_QUEUED_TOKENS.name, 8192.0),
        "tandem-decode": (metric_names.POOL_USAGE.name, 0.7),
    }
    for each in autoscalers(overlay(name)):
        threshold = float(each.threshold.removesuffix("m")) / (1000 if each.threshold.endswith("m") else 1)
        assert (each.metric, threshold) == wanted[each.target]


@EVERY_VARIANT
def test_workers_leave_one_at_a_time_each_after_the_one_before_has_drained(name: str) -> None:
    manifests = overlay(name)
    for each in autoscalers(manifests):
        pod = named(manifests, "Deployment", each.target)["spec"]["template"]["spec"]
        (policy,) = each.behavior["scaleDown"]["policies"]
        assert (policy["type"], policy["value"]) == ("Pods", 1)
        assert policy["periodSeconds"] >= pod["terminationGracePeriodSeconds"]
        assert each.behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300
        assert each.behavior["scaleUp"]["stabilizationWindowSeconds"] <= 30


def test_keda_leaves_a_pool_as_it_is_while_nothing_is_measured() -> None:
    for scaled in of_kind(overlay("autoscale-keda"), "ScaledObject"):
        (trigger,) = scaled["spec"]["triggers"]
        assert "fallback" not in scaled["spec"]  # it would be set at once, past the pace of scaleDown
        assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_keda_s_queries_look_at_this_namespace_and_at_a_container_that_is_there() -> None:
    manifests = overlay("autoscale-keda")
    names = {each.name for each in containers(manifests)}
    for each in autoscalers(manifests):
        namespace = named(manifests, "Deployment", each.target)["metadata"]["namespace"]
        assert each.labels["namespace"] == namespace
        if (
            role_of(each) not in {str(process) for process in METRICS[each.metric].on}
            or len(METRICS[each.metric].on) > 1
        ):
            assert each.labels["container"] == role_of(each)
            assert each.labels["container"] in names


def test_the_adapter_serves_every_metric_that_the_autoscalers_ask_it_for() -> None:
    rules = yaml.safe_load(ADAPTER_RULES.read_text())["rules"]
    served = [re.match(r"\w+", rule["seriesQuery"])[0] for rule in rules]  # type: ignore[index]
    assert sorted(served) == sorted(each.metric for each in autoscalers(overlay("autoscale-hpa")))
    for rule in rules:
        assert {"namespace", "pod"} == rule["resources"]["overrides"].keys()
        for key in rule["resources"]["overrides"]:
            assert f'{key}!=""' in rule["seriesQuery"]


def test_the_two_ways_scale_alike() -> None:
    hpa, keda = (sorted(autoscalers(overlay(name)), key=role_of) for name in VARIANTS)
    assert [(a.least, a.most, a.behavior) for a in hpa] == [(a.least, a.most, a.behavior) for a in keda]
