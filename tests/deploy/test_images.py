"""The images, built and started: `pytest -m images`, as root, with podman, debootstrap and what pip downloads."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from bench.support.reference import Reference
from models.files.checkpoint import resolve_model
from router.tokenization import Tokenization
from tests.deploy.built_pods import Image, Network, image_of, open_pod, process_of
from tests.deploy.manifests import ROOT, overlay
from tests.deploy.pod_client import MAX_TOKENS, PROMPT
from tests.deploy.pods import POD_IP, container
from tests.scripts import load_script

pytestmark = [pytest.mark.images, pytest.mark.timeout(3600)]

TOKEN = "4f1c-of-a-test-and-nowhere-else"
PATIENCE_S = 120.0
IMAGES = Path(os.environ.get("TANDEM_IMAGES", ROOT / "build/images"))
"""Where images are kept: the second build takes what the first one left."""
BUILD = "deploy/docker/build.py"
RIGHTS = {"Uid": "65532", "Gid": "65532", "CapEff": "0" * 16, "NoNewPrivs": "1", "/": "ro"}
ROLES = ("router", "prefill", "decode")


@pytest.fixture(scope="module")
def built() -> Iterator[dict[str, Image]]:
    """Image → its root. Skips where images cannot be built."""
    needed = ("podman", "debootstrap", "unshare", "nsenter", "setpriv", "ip")
    if os.geteuid() != 0 or (missing := [name for name in needed if shutil.which(name) is None]):
        pytest.skip("root is needed" if os.geteuid() != 0 else f"not installed: {', '.join(missing)}")
    subprocess.run([sys.executable, str(ROOT / BUILD), "--debian", "bookworm", "--root", str(IMAGES)], check=True)
    podman = ("podman", "--root", f"{IMAGES}/storage", "--runroot", f"{IMAGES}/run")
    names = {name: f"test-{name.partition(':')[0]}" for name in load_script(BUILD).images()}
    try:
        yield {name: image_of(podman, name, made) for name, made in names.items()}
    finally:
        subprocess.run([*podman, "rm", "--force", *names.values()], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the pods' volumes hold, by name."""
    folder = tmp_path_factory.mktemp("volumes")
    found = {name: folder / name for name in ("tls", "tokens", "model")}
    for each in found.values():
        each.mkdir()
    authority = trustme.CA()
    certificate = authority.issue_cert("tandem")
    authority.cert_pem.write_to_path(found["tls"] / "ca.crt")
    certificate.private_key_pem.write_to_path(found["tls"] / "tls.key")
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(found["tls"] / "tls.crt", append=True)
    (found["tokens"] / "tokens").write_text(TOKEN + "\n")
    for each in folder.rglob("*"):
        os.chown(each, 0, 65532)  # as fsGroup has it
        each.chmod(0o750 if each.is_dir() else 0o440)
    folder.chmod(0o755)
    return found


def in_network(network: Network, volumes: dict[str, Path]) -> dict[str, Any]:
    """What clients get that run beside the pods."""
    command = [sys.executable, "-m", "tests.deploy.pod_client", POD_IP, str(volumes["tls"]), str(volumes["tokens"])]
    asked = subprocess.run([*network.enter, *command], check=True, text=True, stdout=subprocess.PIPE, cwd=ROOT)
    return dict(json.loads(asked.stdout))


def rights_of(process: int) -> dict[str, str]:
    """What the manifests' security contexts are about, as the kernel tells it of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    status = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()}
    (root,) = (line for line in Path(f"/proc/{process}/mounts").read_text().splitlines() if line.split()[1] == "/")
    return {name: status[name] for name in ("Uid", "Gid", "CapEff", "NoNewPrivs")} | {
        "/": root.split()[3].split(",")[0]
    }


def direct_tokens() -> list[int]:
    """transformers' own."""
    folder = resolve_model("demo")
    prompt = asyncio.run(Tokenization.load(folder).encode_text(PROMPT))
    return Reference(folder).generate(prompt, MAX_TOKENS)


def test_the_images_serve_as_the_manifests_start_them_and_end_at_a_signal(
    built: dict[str, Image], volumes: dict[str, Path]
) -> None:
    manifests = overlay("cpu")
    pods = {role: container(manifests, role) for role in ROLES}
    with ExitStack() as stack:
        network = stack.enter_context(Network.opened())
        processes = {}
        for role, pod in pods.items():
            process = stack.enter_context(open_pod(built[pod.spec["image"]], pod, volumes, network))
            stack.callback(process.kill)
            processes[role] = process
        answer = in_network(network, volumes)
        assert {role: rights_of(process_of(each)) for role, each in processes.items()} == dict.fromkeys(ROLES, RIGHTS)
        written = {}
        for role in reversed(ROLES):
            os.kill(process_of(processes[role]), signal.SIGTERM)
            written[role], _ = processes[role].communicate(timeout=PATIENCE_S)
    assert {role: process.returncode for role, process in processes.items()} == dict.fromkeys(ROLES, 0), written
    assert answer["over_grpc"] == answer["over_http"] == direct_tokens()
    # What the router lists for Prometheus is reached at the pods' address; its HTTP port needs no target of its own.
    assert sorted(answer["scraped"]) == [f"{POD_IP}:{port}" for port in (9090, 9091, 9092)]
    assert re.search(r'tandem_http_requests_total\{.*code="200"', answer["scraped"][f"{POD_IP}:9090"])
