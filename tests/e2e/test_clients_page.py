"""What docs/clients.md shows is run as it stands there, and what it says of names and doors holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.cluster import Cluster
from router.kserve_model import INPUTS, OUTPUTS
from tandem.client import Client

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SERVICES = re.findall(r"\| `([\w.]+)` \|", PAGE.split("\n\n")[2])
BUF = Path(sys.executable).with_name("buf")
GREEDY = {"max_tokens": 24, "temperature": 0.0}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_runs_as_it_stands(snippet: str, demo_cluster: Cluster, client: Client) -> None:
    assert "127.0.0.1:50051" in snippet

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet.replace("127.0.0.1:50051", demo_cluster.target)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    text = client.complete("Once upon a time", **GREEDY).text
    if "text_output" in snippet and "cancel" not in snippet:
        assert text in done.stdout
    else:
        assert done.stdout.strip()


@pytest.mark.parametrize("service", SERVICES)
def test_a_door_is_serving(service: str, demo_cluster: Cluster, client: Client) -> None:
    with grpc.insecure_channel(demo_cluster.target) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)

    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_the_page_names_every_door_and_every_output() -> None:
    assert len(SERVICES) == 3
    assert all(f"`{name}`" in PAGE for name in (*OUTPUTS, *list(INPUTS)[:7]))


@pytest.mark.parametrize(
    ("method", "request_json", "expected"),
    [
        (
            "inference.GRPCInferenceService/ModelInfer",
            {
                "id": "by-hand",
                "parameters": {"max_tokens": {"int64Param": "6"}, "temperature": {"doubleParam": 0}},
                "inputs": [
                    {
                        "name": "text_input",
                        "datatype": "BYTES",
                        "shape": ["1"],
                        "contents": {"bytesContents": ["T25jZQ=="]},
                    }
                ],
            },
            "by-hand",
        ),
        (
            "vllm.grpc.engine.VllmEngine/Generate",
            {"text": "Once", "samplingParams": {"maxTokens": 6, "temperature": 0}},
            "length",
        ),
    ],
    ids=["kserve", "vllm"],
)
def test_a_foreign_door_is_opened_by_reflection(
    demo_cluster: Cluster, client: Client, method: str, request_json: dict[str, object], expected: str
) -> None:
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(request_json)]

    done = subprocess.run(
        [*command, f"http://{demo_cluster.target}/{method}"], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
