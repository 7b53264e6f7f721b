"""What deploy/ asks of metrics is what processes declare."""

from __future__ import annotations

import re

from shell.telemetry import metric_names, vllm_names
from tests.metric_references import DEPLOY, referenced_metrics


def test_every_metric_that_deploy_names_is_declared() -> None:
    declared = {*(each.name for each in metric_names.ALL), *(each.name for each in vllm_names.ALL)}
    unknown = {name: files for name, files in referenced_metrics().items() if name not in declared}
    assert not unknown


def test_dashboard_rules_and_autoscalers_are_all_looked_at() -> None:
    files = {file for files in referenced_metrics().values() for file in files}
    for part in (
        "grafana/tandem.json",
        "prometheus/alerts.yml",
        "components/autoscale-hpa",
        "components/autoscale-keda",
    ):
        assert any(file.startswith(part) for file in files), part


def test_every_label_that_a_query_matches_is_one_of_the_metrics() -> None:
    labels = {each.name: {*each.labels, "le"} for each in metric_names.ALL}
    of_targets = {"instance", "job", "namespace", "pod", "container"}
    for name, selector in _selectors():
        matched = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector))
        assert matched <= labels[name] | of_targets, f"{name}{{{selector}}}"


def _selectors() -> list[tuple[str, str]]:
    """(metric, what stands in its braces) of the dashboard and the rules."""
    texts = [
        (DEPLOY / "grafana" / "tandem.json").read_text().replace('\\"', '"'),
        *(path.read_text() for path in (DEPLOY / "prometheus").glob("*.yml") if not path.name.endswith("_test.yml")),
    ]
    found = [pair for text in texts for pair in re.findall(r"(tandem_\w+)\{([^}]*)\}", text)]
    assert len(found) > 20
    return [(re.sub(r"_(bucket|sum|count)$", "", name), selector) for name, selector in found]
