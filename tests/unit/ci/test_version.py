"""The check of a release: version, changelog and tag."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

CHECKS = Path(__file__).parents[3] / ".ci" / "checks"


@pytest.mark.parametrize(
    ("section", "tags", "complaints"),
    [
        ("## 1.2.0 (unreleased)", [], 0),
        ("## 1.2.0 (2026-12-01)", ["v1.2.0"], 0),
        ("## 1.1.0 (2026-11-01)", [], 1),
        ("## 1.2.0", [], 1),
        ("## 1.2.0 (unreleased)", ["v1.2.0"], 1),
        ("## 1.2.0 (2026-12-01)", ["v1.2.0", "v1.3.0"], 1),
    ],
)
def test_a_release_is_told_the_same_everywhere(
    section: str, tags: list[str], complaints: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CHECKS))
    version = importlib.import_module("version")
    changelog = f"# Changelog\n\n{section}\n\n## 1.0.0 (2026-10-01)\n"
    assert len(list(version.findings("1.2.0", changelog, tags))) == complaints
