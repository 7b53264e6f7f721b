"""What README shows is run as it stands there, with the test's address in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format

from bench.support.cluster import Cluster
from tandem.client import Client
from tandem.v1 import inference_pb2
from tests.finished_command import finished

README = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"^\.venv/bin/tandem (generate .*?|status|doctor)$", README, flags=re.MULTILINE)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_python_example_prints_a_continuation(snippet: str, demo_cluster: Cluster, client: Client) -> None:
    here = snippet.replace("127.0.0.1:50051", demo_cluster.target)

    done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, timeout=60, check=True)

    assert len(done.stdout) > 20


def test_the_grpcurl_request_is_a_request() -> None:
    (body,) = re.findall(r"-d '(\{\"text\".*?\})' \\", README)

    request = json_format.Parse(body, inference_pb2.GenerateRequest())

    assert request.sampling.max_tokens == json.loads(body)["sampling"]["max_tokens"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_example_works(command: str, demo_cluster: Cluster, client: Client) -> None:
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)]
    target = [] if command == "doctor" else ["--target", demo_cluster.target]

    done = finished(*words, *target)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
