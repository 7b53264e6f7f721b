"""docs/models.md lists the families that are served, which are those that have a test of exactness."""

from __future__ import annotations

import re
from pathlib import Path

from bench.exactness import RANDOM_MODELS
from bench.report import exact_cells
from bench.support.machine import RESULTS
from models.family import FAMILIES as NATIVE
from models.transformers_families import FAMILIES

ROWS = re.findall(r"^\| `(native|transformers)` \| (.*) \|$", Path("docs/models.md").read_text(), re.MULTILINE)


def test_the_families_of_both_implementations_are_listed() -> None:
    listed = {row: set(re.findall(r"`(\w+)`", names)) for row, names in ROWS}
    assert listed["native"] == set(NATIVE)
    assert listed["native"] ^ listed["transformers"] == FAMILIES  # those in both rows are the exceptions


def test_every_shape_was_served_exactly_over_both_transports() -> None:
    cells = exact_cells((RESULTS / "exactness.txt").read_text())

    for tiny in RANDOM_MODELS:
        assert {"engine", "shm", "tcp"} <= set(cells[tiny.name]), tiny.name


def test_a_setting_in_which_a_prompt_differed_does_not_count_as_exact() -> None:
    lines = (
        "llama  shm  block  1 chunk  64  34/34 prompts equal",
        "llama  tcp  block 16 chunk 512  33/34 prompts equal",
    )

    assert exact_cells("\n".join(lines)) == {"llama": {"shm": {(1, 64)}}}
