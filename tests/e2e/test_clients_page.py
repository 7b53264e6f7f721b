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

from bench.support.cluster import Cluster, serve
from router.faces.kserve.model import INPUTS, OUTPUTS
from tandem.client import Client
from tests.pki import OTHER_TOKEN, TOKEN, Pki

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SNIPPETS_WITH_TLS = re.findall(r"```python tls\n(.*?)```", PAGE, flags=re.DOTALL)
SERVICES = re.findall(r"\| `([\w.]+)` \|", PAGE.split("\n\n")[2])
BUF = Path(sys.executable).with_name("buf")
GREEDY = {"max_tokens": 24, "temperature": 0.0}


def run(snippet: str, target: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own; warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet.replace("127.0.0.1:50051", target)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_runs_as_it_stands(snippet: str, demo_cluster: Cluster, client: Client) -> None:
    assert "127.0.0.1:50051" in snippet

    done = run(snippet, demo_cluster.target)

    assert done.returncode == 0, done.stderr
    text = client.complete("Once upon a time", **GREEDY).text
    if "cancel" in snippet:  # it shows the beginning of a longer text, as it came
        begun = done.stdout.removesuffix("\n")
        assert begun
        assert client.complete("Once upon a time", max_tokens=500, temperature=0.0).text.startswith(begun)
    elif "text_output" in snippet:
        assert text in done.stdout
    else:
        assert done.stdout.strip()


def test_every_client_brings_a_token_over_tls(tmp_path: Path) -> None:
    (snippet,) = SNIPPETS_WITH_TLS
    pki = Pki(tmp_path)
    identity = pki.issue()
    (tmp_path / "ca.crt").write_bytes(Path(pki.ca).read_bytes())
    (tmp_path / "token").write_text(TOKEN)
    security = ("--tls-cert", identity.cert, "--tls-key", identity.key, "--tls-ca", pki.ca)

    with serve("demo", *security, "--token-file", pki.tokens(TOKEN)) as cluster:
        allowed = run(snippet, cluster.target, tmp_path)
        (tmp_path / "token").write_text(OTHER_TOKEN)
        refused = run(snippet.split("with Client(")[0] + snippet.split("model().model)")[1], cluster.target, tmp_path)

    assert allowed.stdout.split() == ["demo", "True", "True"], allowed.stderr
    assert "UNAUTHENTICATED" in refused.stderr


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
