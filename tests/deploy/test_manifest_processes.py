"""The containers' command lines, run: processes on loopback with TLS and tokens, asked by the manifests' probes."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from safetensors.torch import load_file, save_file

from bench.support.cluster import Cluster, run_command
from models.files.checkpoint import resolve_model
from shell.config import ClientSecurityConfig
from tandem.client import Client
from tests.deploy.https import ask
from tests.deploy.manifests import BESIDE_ANOTHER, overlay
from tests.deploy.pods import Container, container
from tests.forked_commands import Forking

TOKEN = "4f1c-of-a-test-and-nowhere-else"
PROBE_TIMEOUT_S = 30
PROMPT, MAX_TOKENS = "Once upon a time", 8


@dataclass(frozen=True, slots=True)
class Started:
    """One container's process."""

    container: Container
    cluster: Cluster
    environment: dict[str, str]

    def probe(self, kind: str) -> int:
        """Asks as the kubelet does, without a token and as often as it does; returns the status.

        Where the machine has stood still for as long as the admin port waits for a request (10 s), the port closes the
        connection before it reads: the answer is empty.
        """
        probe = self.container.probes[kind]
        answers = (self._ask(probe["httpGet"]) for _ in range(probe["failureThreshold"]))
        return int(next(filter(None, answers)).split()[1])

    def address_of(self, port: str) -> str:
        """Returns where a port was opened, as the process's log says; of a whole server's, the router's."""
        told = [json.loads(line) for line in self.cluster.log if f'"{port}"' in line]
        return str(next((each for each in told if "router" in each.values()), told[0])["address"])

    def _ask(self, request: dict[str, str]) -> bytes:
        address = self.address_of("admin port")
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context(cafile=self.environment["TANDEM_TLS_CA"])
        with (
            socket.create_connection((host, int(port)), PROBE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname="tandem") as connection,
        ):
            assert request["scheme"] == "HTTPS"
            connection.sendall(f"GET {request['path']} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            return connection.recv(64)


def set_all(patch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        patch.setenv(name, value)


def on_loopback(text: str, mounts: Path, router: str) -> str:
    """An argument or variable as it is on this machine: free ports, secrets from a folder."""
    text = re.sub(r"tandem-router-headless:\d+", router, text)
    text = re.sub(r"(0\.0\.0\.0|10\.1\.2\.3):\d+", "127.0.0.1:0", text)
    text = re.sub(r"--kv-port=\d+", "--kv-port=0", text)
    return re.sub(r"^/(etc/tandem|models)/", rf"{mounts}/\1/", text)


def start(
    stack: ExitStack, name: str, mounts: Path, router: str = "", overlay_name: str = "cpu", **changed: str
) -> Started:
    """Runs a container of an overlay, with some variables changed; ends with the stack."""
    each = container(overlay(overlay_name), name)
    each.spec["resources"]["limits"]["cpu"] = "1"
    variables = each.environment() | changed
    environment = {key: on_loopback(value, mounts, router) for key, value in variables.items()}
    arguments = [on_loopback(argument, mounts, router) for argument in each.arguments()]
    with pytest.MonkeyPatch.context() as patch:
        set_all(patch, environment)
        cluster = stack.enter_context(run_command(*arguments))
    return Started(each, cluster, environment)


@pytest.fixture(scope="module", autouse=True)
def forked_commands(fork_command: Forking) -> Iterator[None]:
    """What `run_command` starts is forked, with the environment that it is called in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.support.cluster.open_command", fork_command)
        yield


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root below which Secrets, and models, are mounted."""
    root = tmp_path_factory.mktemp("root")
    folder = root / "etc/tandem"
    (folder / "tls").mkdir(parents=True)
    (folder / "tokens").mkdir()
    authority = trustme.CA()
    certificate = authority.issue_cert("tandem")
    authority.cert_pem.write_to_path(folder / "tls/ca.crt")
    certificate.private_key_pem.write_to_path(folder / "tls/tls.key")
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(folder / "tls/tls.crt", append=True)
    (folder / "tokens/tokens").write_text(TOKEN + "\n")
    return root


@pytest.fixture(scope="module")
def started(mounts: Path) -> Iterator[dict[str, Started]]:
    """Router and workers as the overlay `cpu` starts them."""
    with ExitStack() as stack:
        router = start(stack, "router", mounts)
        workers = {name: start(stack, name, mounts, router.cluster.target) for name in ("prefill", "decode")}
        yield {"router": router, **workers}


def answer(router: Started) -> str:
    """Over gRPC, once it is ready."""
    security = ClientSecurityConfig(
        tls_ca=router.environment["TANDEM_TLS_CA"],
        tls_server_name="tandem",
        token_file=router.environment["TANDEM_TOKEN_FILE"],
    )
    with Client(router.cluster.target, security=security) as client:
        client.wait_ready(timeout_s=PROBE_TIMEOUT_S)
        return client.complete(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0).text


def answer_over_http(router: Started) -> str:
    authority = Path(router.environment["TANDEM_TLS_CA"])
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    answered = ask(router.address_of("http"), "/v1/completions", authority, TOKEN, body)
    return str(json.loads(answered)["choices"][0]["text"])


def assert_serves(router: Started) -> None:
    assert answer(router) == answer_over_http(router) != ""


def test_the_cluster_serves_and_its_probes_say_so(started: dict[str, Started]) -> None:
    assert_serves(started["router"])
    for each in started.values():
        assert [each.probe(kind) for kind in each.container.probes] == [200, 200, 200], each.container.name


def test_a_whole_server_in_one_container_serves(mounts: Path) -> None:
    on_cpu = {"TANDEM_DEVICE": "cpu", "TANDEM_THREADS": "1", "TANDEM_KV_MEMORY": "16MiB", "TANDEM_MODEL": "demo"}
    with ExitStack() as stack:
        server = start(stack, "router", mounts, overlay_name="gpu-same-pod", **on_cpu)
        assert_serves(server)
        assert [server.probe(kind) for kind in server.container.probes] == [200, 200, 200]
        assert server.cluster.stop() == 0


def test_an_elastic_worker_alone_serves(mounts: Path) -> None:
    with ExitStack() as stack:
        router = start(stack, "router", mounts, overlay_name="elastic")
        elastic = start(stack, "elastic", mounts, router.cluster.target, overlay_name="elastic")
        assert_serves(router)
        assert [elastic.probe(kind) for kind in elastic.container.probes] == [200, 200, 200]
        assert elastic.cluster.stop() == 0


def test_workers_of_new_weights_answer_once_they_are_more_and_the_old_ones_leave(mounts: Path) -> None:
    demo = resolve_model("demo")
    for name in ("model", "next/model"):
        shutil.copytree(demo, mounts / "models" / name)
    weights = {name: each.flip(0) for name, each in load_file(demo / "model.safetensors").items()}
    save_file(weights, mounts / "models/next/model/model.safetensors", {"format": "pt"})
    old_model = {"TANDEM_MODEL": "/models/model"}
    with ExitStack() as stack:
        router = start(stack, "router", mounts, overlay_name="elastic", **old_model)
        old = start(stack, "elastic", mounts, router.cluster.target, overlay_name="elastic", **old_model)
        before = answer(router)
        more_seats = {"TANDEM_MAX_SEQS": "65"}  # as one more worker would bring them
        start(stack, "elastic", mounts, router.cluster.target, overlay_name=BESIDE_ANOTHER, **more_seats)
        until_s = time.monotonic() + PROBE_TIMEOUT_S
        while (after := answer(router)) == before:
            assert time.monotonic() < until_s
        assert old.cluster.stop() == 0
        assert answer(router) == after


def test_a_router_without_workers_lives_and_is_not_ready(mounts: Path) -> None:
    with ExitStack() as stack:
        alone = start(stack, "router", mounts)
        assert alone.probe("livenessProbe") == alone.probe("startupProbe") == 200
        assert alone.probe("readinessProbe") == 503
