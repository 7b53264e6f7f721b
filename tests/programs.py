"""Programs that some tests need and pip does not bring: promtool, prometheus, chromium, kubectl."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str) -> str:
    """Its path. Skips the test where it is not installed, but fails it where `REQUIRE_PROGRAMS` is set, as CI does."""
    path = shutil.which(name)
    if path is not None:
        return path
    if os.environ.get("REQUIRE_PROGRAMS"):
        pytest.fail(f"{name} is not installed, and REQUIRE_PROGRAMS is set")
    pytest.skip(f"{name} is not installed")
