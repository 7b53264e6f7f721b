"""Programs that some tests need and pip does not bring: promtool, prometheus, chromium, kubectl."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str) -> str:
    """Its path. Skips the test where it is not installed, but fails it where `REQUIRE_PROGRAMS` names it, as in CI."""
    path = shutil.which(name)
    if path is not None:
        return path
    required = os.environ.get("REQUIRE_PROGRAMS", "").split(",")
    if name in required:
        pytest.fail(f"{name} is not installed, and REQUIRE_PROGRAMS names it")
    pytest.skip(f"{name} is not installed")
