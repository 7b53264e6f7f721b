"""The TypeScript of docs/clients.md: generated, compiled and run as it stands there.

Fetches packages from npm, so it runs only where WITH_NPM is set: `WITH_NPM=1 pytest tests/e2e/test_typescript.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.cluster import Cluster
from tandem.client import Client

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()


def block(kind: str) -> str:
    """The page's one block of that kind, such as `ts connect`."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.mark.skipif("WITH_NPM" not in os.environ or shutil.which("npm") is None, reason="needs npm and WITH_NPM=1")
def test_typescript_from_the_page_gets_the_same_text(demo_cluster: Cluster, client: Client, tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"private": true, "type": "module"}')
    (tmp_path / "buf.gen.yaml").write_text(block("yaml connect"))
    (tmp_path / "example.ts").write_text(block("ts connect"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PROTOS": str(ROOT / "protos"), "PATH": path}
    command = f"set -e\n{block('sh connect')}node out/example.js {demo_cluster.target}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(client.complete("Once upon a time", max_tokens=24, temperature=0.0).text)
