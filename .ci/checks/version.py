"""Fails unless a release is told the same everywhere: `tandem.__version__`, the first section of CHANGELOG.md, the tag.

The section is `## VERSION (unreleased)`; on a commit with a tag, `vVERSION`, it has the day in place of the word.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

from sources import ROOT

import tandem


def findings(version: str, changelog: str, tags: Iterable[str]) -> Iterator[str]:
    """What differs; `tags` are those of the commit."""
    section = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    if section is None or section[1] != version:
        yield f"CHANGELOG.md: its first section is to be `## {version} (unreleased)`, or with a day"
    for tag in tags:
        if tag != f"v{version}":
            yield f"tag {tag}: tandem.__version__ is {version}"
        if section is not None and section[2] == "unreleased":
            yield f"tag {tag}: CHANGELOG.md says that {section[1]} is unreleased"


def main() -> int:
    """Exit code 1 if anything differs."""
    command = ["git", "tag", "--points-at", "HEAD", "v*"]
    tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = list(findings(tandem.__version__, (ROOT / "CHANGELOG.md").read_text(), tags))
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
