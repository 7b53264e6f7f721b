"""docs/models.md lists the families that are served, which are those that have a test of exactness."""

from __future__ import annotations

import re
from pathlib import Path

from models.family import FAMILIES as NATIVE
from models.transformers_loading import FAMILIES

ROWS = re.findall(r"^\| `(native|transformers)` \| (.*) \|$", Path("docs/models.md").read_text(), re.MULTILINE)


def test_the_families_of_both_implementations_are_listed() -> None:
    listed = {row: set(re.findall(r"`(\w+)`", names)) for row, names in ROWS}
    assert listed["native"] == set(NATIVE)
    assert listed["native"] ^ listed["transformers"] == FAMILIES  # those in both rows are the exceptions
