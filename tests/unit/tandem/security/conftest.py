"""An authority and its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pki import Pki


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    """Files in a folder of the test's own."""
    return Pki(tmp_path)
