"""The dashboard: what Grafana needs to import it, and queries that Prometheus can parse."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import program

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "tandem.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded = json.loads(DASHBOARD.read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_it_can_be_imported_anywhere(dashboard: dict[str, Any]) -> None:
    assert dashboard["title"] == "Tandem"
    assert dashboard["schemaVersion"] >= 38  # Grafana 10
    assert "id" not in dashboard  # the instance's to give
    variables = {each["name"]: each["type"] for each in dashboard["templating"]["list"]}
    assert variables == {"datasource": "datasource", "namespace": "query", "model": "query"}


def test_every_panel_says_what_it_shows_and_from_where(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        title = panel["title"]
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["targets"], title
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), title
        assert all(each["datasource"] == DATASOURCE for each in (panel, *panel["targets"])), title


def test_every_query_is_one_that_prometheus_parses(panels: list[dict[str, Any]], tmp_path: Path) -> None:
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = [
        {
            "record": f"panel:{number}",
            "expr": query.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$namespace", ".*"),
        }
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not any("$" in rule["expr"] for rule in rules)


def test_every_query_keeps_to_the_namespaces_and_models_chosen(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        for target in panel["targets"]:
            assert '{namespace=~"$namespace", model=~"$model"' in target["expr"], panel["title"]
