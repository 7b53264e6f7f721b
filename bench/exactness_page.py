"""Renders the table of `docs/models.md` from `bench/results/exactness.txt`: `python -m bench.exactness_page`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.support.markdown import table

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "bench" / "results" / "exactness.txt"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- exactness: rendered by python -m bench.exactness_page -->\n", "<!-- exactness: end -->\n"
SYSTEMS = ("engine", "shm", "tcp", "colocated")
_LINE = re.compile(r"(\S+) +(\w+) +block +(\d+) chunk +(\d+) +(\d+)/(\d+) prompts equal")

Cells = Mapping[str, frozenset[tuple[int, int]]]
"""By system: (block size, chunk budget) of each setting in which every prompt was equal."""


def exact_cells(record: str) -> Mapping[str, Cells]:
    """By label. A setting in which one prompt differed is not among them."""
    cells: dict[str, dict[str, frozenset[tuple[int, int]]]] = {}
    for label, system, block_size, chunk_tokens, equal, prompts in _LINE.findall(record):
        if equal == prompts:
            known = cells.setdefault(label, {})
            known[system] = known.get(system, frozenset()) | {(int(block_size), int(chunk_tokens))}
    return cells


def render(record: str) -> str:
    """A row for all shapes that were checked alike; the text between the marks."""
    shapes: dict[tuple[str, ...], list[str]] = {}
    for label, cells in exact_cells(record).items():
        row = tuple(_settings(cells.get(system, frozenset())) for system in SYSTEMS)
        shapes.setdefault(row, []).append(f"`{label}`")
    return table((*SYSTEMS, "shapes"), [(*row, ", ".join(labels)) for row, labels in shapes.items()])


def put(page: str, rendered: str) -> str:
    """The page with `rendered` between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{rendered}{END}{rest.partition(END)[2]}"


def _settings(settings: frozenset[tuple[int, int]]) -> str:
    chunks = sorted({chunk for _, chunk in settings})
    sizes = sorted({size for size, _ in settings})
    if settings and len(settings) == len(chunks) * len(sizes):
        return f"{_either(sizes)} · {_either(chunks)}"
    return "; ".join(f"{size} · {chunk}" for size, chunk in sorted(settings)) or "–"


def _either(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def main() -> int:
    """Writes the page."""
    PAGE.write_text(put(PAGE.read_text(), render(RECORD.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
