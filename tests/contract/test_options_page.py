"""The page on options says what is declared."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from shell.config import ClientConfig, DecodeConfig, ElasticConfig, PrefillConfig, RouterConfig, ServeConfig
from shell.removed_options import REMOVED
from tandem.options import Section, options_of
from tests.scripts import load_script

CONFIGS = (RouterConfig, PrefillConfig, DecodeConfig, ElasticConfig, ServeConfig, ClientConfig)


@pytest.fixture
def check() -> ModuleType:
    """The script that makes the page."""
    return load_script(".ci/checks/options_page.py")


def test_the_page_is_that_of_the_declarations(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["options_page.py"])
    assert check.main() == 0


def test_it_has_every_option_that_is_shown_and_every_removed_one(check: ModuleType) -> None:
    page, _, removed = check.page().partition("## Removed options")
    shown = {each.flag for config in CONFIGS for each in options_of(config) if each.section is not Section.INTERNAL}
    assert flags_of(page) == shown
    assert flags_of(removed) == {f"--{name}" for name in REMOVED}


def flags_of(page: str) -> set[str]:
    return set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE))


def test_more_options_than_somebody_reads_are_noticed(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MOST_OPTIONS", len(check.of_processes()) - 1)
    assert check.main() == 1
