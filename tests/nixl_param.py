"""The transport `nixl` as a parameter of tests: skipped where the package is not installed, unless `REQUIRE_PROGRAMS`
names it.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from kvtransfer.nixl_agent import package

_REQUIRED = "nixl" in os.environ.get("REQUIRE_PROGRAMS", "").split(",")
_ABSENT = not _REQUIRED and importlib.util.find_spec(package()) is None

WHY_NOT = "nixl is not installed: it comes with the extra `nixl`" if _ABSENT else None
needs_nixl = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
NIXL = pytest.param("nixl", marks=needs_nixl)
