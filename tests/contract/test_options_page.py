"""The page on options says what is declared."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shell.config import ClientConfig, DecodeConfig, ElasticConfig, PrefillConfig, RouterConfig, ServeConfig
from tandem.options import options_of
from tests.scripts import load_script

CONFIGS = (RouterConfig, PrefillConfig, DecodeConfig, ElasticConfig, ServeConfig, ClientConfig)


@pytest.fixture
def check() -> ModuleType:
    """The script that makes the page."""
    return load_script(".ci/checks/options_page.py")


def test_the_page_is_that_of_the_declarations(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["options_page.py"])
    assert check.main() == 0


def test_it_has_every_option_of_every_process_and_of_commands_that_call_one(check: ModuleType) -> None:
    named = set(re.findall(r"^\| `(--[a-z-]+)", check.page(), re.MULTILINE))
    assert named == {each.flag for config in CONFIGS for each in options_of(config)}


def test_a_stale_page_is_noticed(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["options_page.py"])
    monkeypatch.setattr(check, "PAGE", tmp_path / "options.md")
    assert check.main() == 1
    check.PAGE.write_text(check.page().replace("--block-size", "--blocksize"))
    assert check.main() == 1
