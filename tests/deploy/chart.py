"""The Helm chart rendered, without Helm: its templates keep to Go's text/template, which kubectl has too."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import DEPLOY, Manifest
from tests.programs import program

CHART = DEPLOY / "helm/tandem"


def values(*files: str, **changes: Any) -> dict[str, Any]:
    """values.yaml, and over it other files of the chart and changes, as `helm -f` and `--set` would lay them."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    for file in files:
        found = _merged(found, yaml.safe_load((CHART / file).read_text()))
    return _merged(found, changes)


def rendered(folder: Path, given: dict[str, Any], namespace: str = "tandem") -> list[Manifest]:
    """What `helm template` makes of the chart. `folder` is written to."""
    templates = sorted((CHART / "templates").glob("*.yaml"))
    texts = [_rendered(folder, given, namespace, template) for template in templates]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def notes(folder: Path, given: dict[str, Any], namespace: str = "tandem") -> str:
    """Returns the text that `helm install` prints at its end."""
    return _rendered(folder, given, namespace, CHART / "templates/NOTES.txt")


def _rendered(folder: Path, given: dict[str, Any], namespace: str, template: Path) -> str:
    context = {"apiVersion": "v1", "kind": "Values", "metadata": {"name": "values"}}
    file = folder / "values.json"
    file.write_text(yaml.safe_dump(context | {"Values": given, "Release": {"Namespace": namespace}}))
    whole = folder / "template"
    whole.write_text((CHART / "templates/_value.tpl").read_text() + template.read_text())
    # Changes nothing on a cluster: it reads a file and prints it through the template.
    command = [program("kubectl"), "annotate", "--local", "-f", str(file), "a=b", "-o", f"go-template-file={whole}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Maps are laid over each other, all else is replaced."""
    result = copy.deepcopy(below)
    for key, value in above.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result
