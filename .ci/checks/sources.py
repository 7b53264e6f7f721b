"""The Python files that the checks look at: everything in git, generated stubs left out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = re.compile(r"tandem/v1/|tandem/foreign/.*_pb2")


def python_files() -> list[Path]:
    """Tracked files, and new ones that git does not ignore; absolute, sorted."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return sorted(ROOT / name for name in listed if not GENERATED.match(name) and (ROOT / name).exists())
