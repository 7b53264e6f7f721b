"""Prints what tandem-serving depends on, with the extras named: an image installs it in a layer of its own."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(project: Path, extras: list[str]) -> list[str]:
    """Of pyproject.toml; an extra that stands for others is taken as these."""
    read = tomllib.loads(project.read_text())
    found: list[str] = list(read["tool"]["tandem"]["dependencies"])
    for extra in extras:
        for each in read["project"]["optional-dependencies"][extra]:
            name, _, inner = each.partition("[")
            if name == read["project"]["name"]:
                found += requirements(project, inner.rstrip("]").split(","))
            else:
                found.append(each)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    print(*requirements(Path("pyproject.toml"), [each for each in ",".join(sys.argv[1:]).split(",") if each]), sep="\n")
