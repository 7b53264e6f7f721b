"""The environment of the tests holds protobuf 6, for two clients want it below 7. Tandem itself runs on 7 too: here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.support.cluster import Cluster, serve
from tandem.client import Client

pytestmark = pytest.mark.usefixtures("real_commands")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(sys.prefix, "protobuf7")
"""Made by `make test`."""
STUBS = [
    f"{package}.{path.stem}"
    for package in ("tandem.v1", "tandem.foreign")
    for path in sorted((ROOT / package.replace(".", "/")).glob("*_pb2*.py"))
]


@pytest.fixture(scope="module")
def protobuf_7(demo_cluster: Cluster) -> Iterator[None]:
    """Processes started inside find protobuf 7 before the environment's own. `demo_cluster` is outside."""
    if not PACKAGES.is_dir():
        if os.environ.get("REQUIRE_PROGRAMS"):
            pytest.fail(f"{PACKAGES} is missing, and REQUIRE_PROGRAMS is set")
        pytest.skip(f"{PACKAGES} is missing: `make test` makes it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PACKAGES))
        yield


@pytest.fixture(scope="module")
def cluster(protobuf_7: None) -> Iterator[Cluster]:
    with serve("demo", "--prefill", "1", "--decode", "1") as cluster:
        yield cluster


def test_every_stub_is_imported_with_protobuf_7(protobuf_7: None) -> None:
    assert len(STUBS) == 16
    code = f"import google.protobuf, importlib; [importlib.import_module(name) for name in {STUBS}]"

    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(google.protobuf.__version__)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stdout.startswith("7.")


def test_a_cluster_on_protobuf_7_gives_the_same_text(cluster: Cluster, client: Client) -> None:
    asked = {"max_tokens": 30, "temperature": 1.1, "seed": 4}
    with Client(cluster.target) as on_7:
        on_7.wait_ready(timeout_s=30)
        for worker in on_7.status().workers:
            maps = Path(f"/proc/{worker.info.pid}/maps").read_text()
            assert str(PACKAGES.resolve()) in maps  # its C library is loaded there

        text = on_7.complete("Once upon a time", **asked).text

    assert text
    assert text == client.complete("Once upon a time", **asked).text


@pytest.mark.parametrize(
    "service", ["tandem.v1.InferenceService", "inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine"]
)
def test_every_door_of_a_cluster_on_protobuf_7_is_serving(cluster: Cluster, service: str) -> None:
    with grpc.insecure_channel(cluster.target) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)

    assert health.status == health_pb2.HealthCheckResponse.SERVING
