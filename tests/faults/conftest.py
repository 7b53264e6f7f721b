"""Leases that a test shortens."""

from __future__ import annotations

import pytest

from tests.faults.leases import Leases


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> Leases:
    return Leases(monkeypatch)
