"""The page on metrics says what is declared."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check() -> ModuleType:
    """The script that makes the page's tables."""
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / ".ci/checks/metrics_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_declarations(check: ModuleType) -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    assert check.with_tables(page) == page
    assert "| `tandem_kv_pool_blocks` | gauge | `state` | workers |" in page


def test_a_page_without_a_place_for_a_table_is_refused(check: ModuleType) -> None:
    with pytest.raises(ValueError, match="no place for the table of metrics"):
        check.with_tables("# Observability\n")
