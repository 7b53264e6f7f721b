"""Autoscalers against what they scale and what they measure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.thresholds import write_component
from shell.telemetry import metric_names
from shell.telemetry.metric import Kind
from tests.deploy.manifests import DEPLOY, Manifest, named, of_kind, overlay, own_overlay
from tests.deploy.pods import containers
from tests.deploy.test_schemas import OLDEST, check

VARIANTS = {
    "autoscale-hpa": "HorizontalPodAutoscaler",
    "autoscale-keda": "ScaledObject",
    "elastic-hpa": "HorizontalPodAutoscaler",
    "elastic-keda": "ScaledObject",
}
EVERY_VARIANT = pytest.mark.parametrize("name", VARIANTS)
METRICS = {metric.name: metric for metric in metric_names.ALL}
ADAPTER_RULES = DEPLOY / "components/autoscale-hpa/adapter-rules.yaml"
TOKENS, SHARE = 8192.0, 0.7
FOLLOWED = {
    "prefill": {metric_names.PREFILL_QUEUED_TOKENS.name: TOKENS},
    "decode": {metric_names.POOL_USAGE.name: SHARE},
    "elastic": {metric_names.POOL_USAGE.name: SHARE, metric_names.DECODE_QUEUED_TOKENS.name: TOKENS},
}


@dataclass(frozen=True, slots=True)
class Measure:
    """What one pool is scaled by."""

    metric: str
    threshold: str
    labels: dict[str, str]
    averaged: bool = False
    """Over time."""

    @property
    def value(self) -> float:
        """The threshold's."""
        return float(self.threshold.removesuffix("m")) / (1000 if self.threshold.endswith("m") else 1)


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """What both kinds say, in one form."""

    target: str
    least: int
    most: int
    behavior: dict[str, Any]
    measures: tuple[Measure, ...]

    @property
    def role(self) -> str:
        """Of the workers that it scales, which is their container's name too."""
        return self.target.removeprefix("tandem-")


def autoscalers(manifests: list[Manifest]) -> Iterator[Autoscaler]:
    for hpa in of_kind(manifests, "HorizontalPodAutoscaler"):
        spec = hpa["spec"]
        pods = [each["pods"] for each in spec["metrics"]]
        yield Autoscaler(
            spec["scaleTargetRef"]["name"],
            spec["minReplicas"],
            spec["maxReplicas"],
            spec["behavior"],
            tuple(Measure(each["metric"]["name"], each["target"]["averageValue"], {}) for each in pods),
        )
    for scaled in of_kind(manifests, "ScaledObject"):
        spec = scaled["spec"]
        yield Autoscaler(
            spec["scaleTargetRef"]["name"],
            spec["minReplicaCount"],
            spec["maxReplicaCount"],
            spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
            tuple(measure_of(each["metadata"]) for each in spec["triggers"]),
        )


def measure_of(trigger: dict[str, str]) -> Measure:
    found = re.fullmatch(r"sum\((avg_over_time\()?(\w+)\{(.*)\}(\[2m\]\))?\)", trigger["query"])
    assert found is not None
    average, metric, labels, window = found.groups()
    assert (average is None) == (window is None)
    labels_by_name = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return Measure(metric, trigger["threshold"], labels_by_name, averaged=average is not None)


@EVERY_VARIANT
def test_each_pool_has_an_autoscaler_of_its_own(name: str) -> None:
    manifests = overlay(name)
    found = list(autoscalers(manifests))
    pools = {each["metadata"]["name"] for each in of_kind(manifests, "Deployment")} - {"tandem-router"}
    assert sorted(each.target for each in found) == sorted(pools)
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
        for measure in each.measures:
            assert METRICS[measure.metric].kind is Kind.GAUGE
            assert each.role in METRICS[measure.metric].on


@EVERY_VARIANT
def test_pools_follow_prompt_tokens_that_wait_where_prompts_are_computed_and_the_use_of_kv_where_streams_run(
    name: str,
) -> None:
    for each in autoscalers(overlay(name)):
        assert {measure.metric: measure.value for measure in each.measures} == FOLLOWED[each.role]


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


KEDA = pytest.mark.parametrize("name", [name for name, kind in VARIANTS.items() if kind == "ScaledObject"])


@KEDA
def test_keda_s_queries_look_at_this_namespace_and_at_a_container_that_is_there(name: str) -> None:
    manifests = overlay(name)
    names = {each.name for each in containers(manifests)}
    for each in autoscalers(manifests):
        namespace = named(manifests, "Deployment", each.target)["metadata"]["namespace"]
        for measure in each.measures:
            assert measure.labels["namespace"] == namespace
            if METRICS[measure.metric].on != (each.role,):
                assert measure.labels["container"] == each.role
                assert measure.labels["container"] in names


def test_tokens_in_line_are_averaged_as_in_a_plan_s_thresholds() -> None:
    rules = yaml.safe_load(ADAPTER_RULES.read_text())["rules"]
    averaged = {rule["seriesQuery"].partition("{")[0]: "avg_over_time" in rule["metricsQuery"] for rule in rules}
    scaled = [each for name in ("autoscale-keda", "elastic-keda") for each in autoscalers(overlay(name))]
    averaged_by_keda = {measure.metric: measure.averaged for each in scaled for measure in each.measures}
    assert averaged == averaged_by_keda == {metric: "queued" in metric for metric in averaged}


def test_the_adapter_serves_every_metric_that_the_autoscalers_ask_it_for() -> None:
    rules = yaml.safe_load(ADAPTER_RULES.read_text())["rules"]
    served = [re.match(r"\w+", rule["seriesQuery"])[0] for rule in rules]  # type: ignore[index]
    scaled = [each for name in ("autoscale-hpa", "elastic-hpa") for each in autoscalers(overlay(name))]
    assert sorted(served) == sorted({measure.metric for each in scaled for measure in each.measures})
    for rule in rules:
        assert {"namespace", "pod"} == rule["resources"]["overrides"].keys()
        for key in rule["resources"]["overrides"]:
            assert f'{key}!=""' in rule["seriesQuery"]
        for containers_named in re.findall(r'container=~"([\w|]+)"', rule["seriesQuery"] + rule["metricsQuery"]):
            asking = {each.role for each in scaled for m in each.measures if rule["seriesQuery"].startswith(m.metric)}
            assert set(containers_named.split("|")) == asking


@pytest.mark.parametrize("names", [("autoscale-hpa", "autoscale-keda"), ("elastic-hpa", "elastic-keda")])
def test_the_two_ways_scale_alike(names: tuple[str, str]) -> None:
    hpa, keda = (sorted(autoscalers(overlay(name)), key=lambda each: each.target) for name in names)
    assert [(a.least, a.most, a.behavior) for a in hpa] == [(a.least, a.most, a.behavior) for a in keda]


@EVERY_VARIANT
def test_a_plan_s_thresholds_take_the_place_of_those_in_the_manifests(name: str, tmp_path: Path) -> None:
    planned = {role: {metric: value / 7 for metric, value in each.items()} for role, each in FOLLOWED.items()}
    write_component(tmp_path / "thresholds", planned)
    manifests = own_overlay(tmp_path, {"resources": [f"../{name}"], "components": ["thresholds"]})
    for manifest in manifests:
        check(manifest, OLDEST)
    for before, after in zip(autoscalers(overlay(name)), autoscalers(manifests), strict=True):
        found = {measure.metric: measure.value for measure in after.measures}
        assert found == pytest.approx(planned[before.role], abs=5e-4)
        assert dataclasses.replace(after, measures=before.measures) == before
