"""What the tutorial, docs/index.md, shows below a command is printed by it: texts to the letter, tables by row."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.cluster import Cluster
from tests.finished_command import finished

PAGE = (Path(__file__).parents[2] / "docs" / "index.md").read_text()
SHOWN = re.findall(
    r"^```(?:python)?\n((?:tandem generate|tandem status|tandem bench|from).*?)^```.*?^```\n(.*?)^```",
    PAGE,
    re.M | re.S,
)


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command.split("\n")[0] for command, _ in SHOWN])
def test_a_command_prints_what_is_shown_below_it(command: str, shown: str, demo_cluster: Cluster) -> None:
    if not command.startswith("tandem"):
        here = command.replace("127.0.0.1:50051", demo_cluster.target)
        done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, timeout=60, check=True)
        text, cached = r"cached_tokens=\d+", "cached_tokens=0"
        assert re.sub(text, cached, done.stdout) == shown
        return
    words = shlex.split(re.sub(r"\\\n|\$(?=')", "", command))[1:]
    words = [word.encode().decode("unicode_escape") for word in words]
    ran = finished(*words, "--target", demo_cluster.target)
    assert ran.returncode == 0, ran.stderr
    if words[0] == "generate":
        assert ran.stdout.rstrip("\n") == shown.partition("finish: ")[0].rstrip("\n")
    else:
        begun = {line.split()[0] for line in ran.stdout.splitlines() if line}
        assert {line.split()[0] for line in shown.splitlines()} - {"…"} <= begun


def test_the_tutorial_shows_an_answer_of_each_kind() -> None:
    assert len(SHOWN) == 6
