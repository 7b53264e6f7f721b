"""The page on metrics says what is declared."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.scripts import ROOT, load_script


@pytest.fixture
def check() -> ModuleType:
    """The script that makes the page's tables."""
    return load_script(".ci/checks/metrics_page.py")


def test_the_tables_are_those_of_the_declarations(check: ModuleType) -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    assert check.with_tables(page) == page
    assert "| `tandem_kv_pool_blocks` | gauge | `state` | workers |" in page
