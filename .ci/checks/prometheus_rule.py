"""Keeps the PrometheusRule of deploy/ equal to the rules in deploy/prometheus; `--write` renews it."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = tuple(ROOT / "deploy/prometheus" / name for name in ("recording.yml", "alerts.yml"))
MANIFEST = ROOT / "deploy/components/monitoring/prometheus-rule.yaml"
HEADER = (
    "# Made from deploy/prometheus by `python .ci/checks/prometheus_rule.py --write`: kustomize cannot wrap a file.\n"
)


def manifest(sources: tuple[Path, ...] = RULES) -> str:
    """The file's text: every group of every source, in order."""
    groups = [group for source in sources for group in yaml.safe_load(source.read_text())["groups"]]
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tandem"},
        "spec": {"groups": groups},
    }
    return HEADER + yaml.safe_dump(resource, sort_keys=False, width=1000, allow_unicode=True)


def main() -> int:
    """0 if the file is true."""
    if "--write" in sys.argv:
        MANIFEST.write_text(manifest())
    elif MANIFEST.read_text() != manifest():
        print(f"{MANIFEST.relative_to(ROOT)} is stale; run python .ci/checks/prometheus_rule.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
