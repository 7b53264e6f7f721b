"""The commands of docs/security.md do what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.cluster import Cluster, run_command
from shell.admin import port
from shell.rpc import bounds
from tandem.security.tls import HANDSHAKE_TIMEOUT_S, ServerTls
from tandem.security.tokens import MIN_TOKEN_CHARS
from tests.finished_command import finished
from tests.programs import program

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
STEPS = dict(re.findall(r"^```sh (\w+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))


def run_step(name: str, folder: Path) -> None:
    program("openssl")
    done = subprocess.run(
        ["bash", "-euc", STEPS[name]], cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def arguments(name: str, folder: Path) -> list[str]:
    """Of a `tandem` command on the page, with its files in `folder`."""
    words = shlex.split(STEPS[name].replace("\\\n", " "))
    assert words[0] == "tandem"
    return [str(folder / word) if (folder / word).is_file() else word for word in words[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's first three steps were run."""
    folder = tmp_path_factory.mktemp("page")
    for step in ("authority", "certificate", "token"):
        run_step(step, folder)
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    words = [word.replace("127.0.0.1:50051", "127.0.0.1:0") for word in arguments("serve", folder)]
    with run_command(*words) as cluster:
        yield cluster


def call(cluster: Cluster, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [word.replace("127.0.0.1:50051", cluster.target) for word in arguments("call", folder)]
    return finished(*words)


def test_the_page_serves_and_calls(cluster: Cluster, folder: Path) -> None:
    answer = call(cluster, folder)

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def test_the_certificate_step_run_again_is_a_rotation(cluster: Cluster, folder: Path) -> None:
    tls = ServerTls(str(folder / "tls.crt"), str(folder / "tls.key"))
    before = tls.pem()
    run_step("certificate", folder)

    assert tls.pem() != before
    assert call(cluster, folder).returncode == 0


def test_the_token_file_is_its_owners_alone(folder: Path) -> None:
    assert (folder / "tokens").stat().st_mode & 0o077 == 0


def test_the_caps_are_those_of_the_code() -> None:
    assert f"| metadata of a call | {bounds.MAX_METADATA_BYTES // 1024} KiB |" in PAGE
    assert f"| streams on a connection | {bounds.MAX_STREAMS_PER_CONNECTION} |" in PAGE
    assert f"over all connections | {bounds.MAX_PENDING_CALLS};" in PAGE
    assert f"handshakes included | {bounds.MAX_CONNECTIONS};" in PAGE
    assert f"where one is asked | {bounds.MAX_TOKENLESS_CALLS} at a time on a connection" in PAGE
    assert f"request is {bounds.MAX_TOKENLESS_REQUEST_BYTES // 1024} KiB at most" in PAGE
    assert f"arrives within {bounds.TOKENLESS_REQUEST_S:g} s" in PAGE
    assert f"or for the rest of one | {port._IDLE_S:g} s" in PAGE
    assert f"fields of {port._MAX_FIELD_BYTES // 1024} KiB" in PAGE
    assert f"| a TLS handshake | {HANDSHAKE_TIMEOUT_S:g} s;" in PAGE
    assert f"| a gRPC connection without calls | {bounds.MAX_IDLE_S / 60:g} min" in PAGE
    assert f"at least {MIN_TOKEN_CHARS} characters" in PAGE
