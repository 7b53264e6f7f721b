"""Prometheus' files by its own tool; and what each alert owes to whoever is woken by it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import program

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
SITE = "https://docs.example.com/tandem"
"""Stands for where the pages are read."""


def alerts() -> list[dict[str, Any]]:
    """All alerts as written."""
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str) -> None:
    """Fails with what the tool says."""
    done = subprocess.run(
        [program("promtool"), *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_and_its_rules_are_valid() -> None:
    promtool("check", "config", "prometheus.yml")


def test_the_alerts_fire_and_stay_silent_as_their_tests_say() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    scenes = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    expected = [each for scene in scenes for each in scene["alert_rule_test"]]
    names = {alert["alert"] for alert in alerts()}
    assert {each["alertname"] for each in expected if each.get("exp_alerts")} == names
    assert {each["alertname"] for each in expected if not each.get("exp_alerts")} == names


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_how_grave_it_is_what_it_means_and_what_to_do(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"{SITE}/operations.html#{name.lower()}"
    section = re.search(rf"^### {name}\n\n(.+)", (ROOT / "docs" / "operations.md").read_text(), flags=re.MULTILINE)
    assert section, f"docs/operations.md has no section on {name}"


def test_every_runbook_belongs_to_an_alert() -> None:
    sections = re.findall(r"^### (Tandem\w+)$", (ROOT / "docs" / "operations.md").read_text(), flags=re.MULTILINE)
    assert sections == [alert["alert"] for alert in alerts()]
