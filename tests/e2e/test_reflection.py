"""What grpcurl would do, done with `buf curl`: nothing but an address is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.cluster import Cluster
from tandem.client import Client

BUF = Path(sys.executable).with_name("buf")


def buf_curl(target: str, *arguments: str) -> str:
    """Runs `buf curl` over plaintext HTTP/2 with server reflection; raises with its words if it fails."""
    *options, path = arguments
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *options, f"http://{target}{path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
def test_reflection_lists_every_service(demo_cluster: Cluster, client: Client, protocol: str) -> None:
    listed = buf_curl(demo_cluster.target, "--list-services", "--reflect-protocol", protocol, "").split()

    assert {
        "tandem.v1.InferenceService",
        "tandem.v1.ClusterService",
        "tandem.v1.RegistryService",
        "grpc.health.v1.Health",
    } <= set(listed)


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
def test_a_generation_streams_by_reflection(demo_cluster: Cluster, client: Client, protocol: str) -> None:
    request = {"requestId": "by-hand", "text": "Once upon a time", "sampling": {"maxTokens": 6, "temperature": 0}}

    output = buf_curl(
        demo_cluster.target,
        *("--reflect-protocol", protocol, "-d", json.dumps(request)),
        "/tandem.v1.InferenceService/Generate",
    )

    messages = [json.loads(message) for message in output.replace("}\n{", "}\0{").split("\0")]
    expected = client.complete("Once upon a time", max_tokens=6, temperature=0.0)
    assert "".join(message.get("text", "") for message in messages) == expected.choices[0].text
    assert {message["requestId"] for message in messages} == {"by-hand"}
    assert messages[-1]["usage"]["completionTokens"] == 6


def test_health_is_told_by_reflection(demo_cluster: Cluster, client: Client) -> None:
    answer = buf_curl(demo_cluster.target, "-d", "{}", "/grpc.health.v1.Health/Check")

    assert json.loads(answer) == {"status": "SERVING"}
