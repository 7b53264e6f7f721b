"""A request-shaped feature lands in few files: `bench/results/logit_softening.patch` adds one, and its tests pass.

The patch is a trial of the house and is not merged. After a change that it no longer fits, apply it by hand, and write
`git diff` without generated files there again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "bench" / "results" / "logit_softening.patch"
GENERATOR = Path(sys.executable).parents[1] / "gen"
FILES = re.findall(r"^\+\+\+ b/(\S+)$", PATCH.read_text(), re.MULTILINE)
BESIDE = ("tests/", "docs/")
MOST_FILES, MOST_ROOMS = 9, 4
TIMEOUT_S = 100.0


def run(folder: Path, *command: str, **variables: str) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_feature_touches_few_files_in_few_rooms() -> None:
    rooms = {file.split("/")[0] for file in FILES if not file.startswith(BESIDE)}

    assert len(FILES) <= MOST_FILES, FILES
    assert len(rooms) <= MOST_ROOMS, rooms


def test_the_patch_applies_and_its_tests_pass(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name, follow_symlinks=False)

    run(tmp_path, "git", "apply", str(PATCH))
    run(tmp_path, "bash", ".ci/gen.sh", ".", PYTHON=sys.executable, GEN=str(GENERATOR))
    tests = [file for file in FILES if file.startswith("tests/")]
    run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, PYTHONPATH=str(tmp_path))
