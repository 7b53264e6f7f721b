"""Lines of the product by room, of checkouts and revisions side by side: `python -m bench.lines [REV|DIR …]`.

Counted are all lines of `.py`, `.cpp` and `.h` files that git knows or does not ignore; generated stubs
are left out. The core is every room of the product; tests, benchmarks, checks, protocols and page assets
stand below it. A folder is counted as it lies there, a revision as it was committed; without arguments,
this checkout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.support.markdown import table

CORE = "core"
_SOURCES = (".py", ".cpp", ".h")
_PAGE_ASSETS = (".js", ".html", ".css")
_GENERATED = "_pb2"
_BESIDE = ("tests", "bench", ".ci", "build script", "protos", "page assets")
"""Rooms that are no part of the core, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of one room."""

    files: int = 0
    lines: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.files + other.files, self.lines + other.lines)


Sizes = dict[str, Size]
"""By room; the core's sum stands among them as `CORE`."""


def count(where: str) -> Sizes:
    """Of a folder or a revision. Raises CalledProcessError if git knows neither."""
    sizes: Sizes = {}
    for file, lines in _lines_of(where).items():
        room = _room(file)
        if room is not None:
            sizes[room] = sizes.get(room, Size()) + Size(1, lines)
    sizes[CORE] = sum((size for room, size in sizes.items() if room not in _BESIDE), Size())
    return sizes


def _lines_of(where: str) -> dict[str, int]:
    """Every file with its number of lines: `git grep` counts those that match a pattern which every line matches."""
    is_folder = Path(where).is_dir()
    folder = where if is_folder else "."
    what = ["--untracked"] if is_folder else [where]
    command = ["git", "-C", folder, "grep", "--full-name", "-I", "-c", "-e", "", *what]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    prefix = "" if is_folder else f"{where}:"
    pairs = (line.removeprefix(prefix).rpartition(":") for line in listed)
    return {file: int(lines) for file, _, lines in pairs}


def _room(file: str) -> str | None:
    """The top folder, or what stands beside the rooms; None for what is not counted."""
    path = Path(file)
    top = path.parts[0]
    if _GENERATED in path.name:
        return None
    if path.suffix in _PAGE_ASSETS and top not in _BESIDE:
        return "page assets"
    if top == "protos":
        return "protos" if path.suffix == ".proto" else None
    if path.suffix not in _SOURCES:
        return None
    return "build script" if len(path.parts) == 1 else top


def as_markdown(columns: Mapping[str, Sizes]) -> str:
    """Lines and files of each room; with two columns also the change in lines."""
    rooms = sorted({room for sizes in columns.values() for room in sizes} - {CORE, *_BESIDE})
    known = [*rooms, CORE, *(room for room in _BESIDE if any(room in sizes for sizes in columns.values()))]
    header = ["room", *(f"{name}: {what}" for name in columns for what in ("lines", "files"))]
    rows = [_row(room, list(columns.values())) for room in known]
    return table([*header, "change"] if len(columns) == 2 else header, rows)


def _row(room: str, columns: Sequence[Sizes]) -> list[str]:
    sizes = [sizes.get(room, Size()) for sizes in columns]
    cells = [f"**{room}**" if room == CORE else room]
    for size in sizes:
        cells += [f"{size.lines:,}", str(size.files)]
    if len(sizes) == 2:
        before, after = sizes
        share = f" ({after.lines / before.lines - 1:+.1%})" if before.lines else ""
        cells.append(f"{after.lines - before.lines:+,}{share}")
    return cells


def main() -> int:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="*", metavar="REV|DIR")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        columns = {where: count(where) for where in args.where or ["."]}
    except subprocess.CalledProcessError as error:
        parser.error(error.stderr.strip())
    if args.json:
        print(json.dumps({name: {room: asdict(size) for room, size in each.items()} for name, each in columns.items()}))
    else:
        print(as_markdown(columns), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
