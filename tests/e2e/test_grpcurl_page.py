"""Every command of docs/clients.md, run through `buf curl`, which speaks the same reflection protocol."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from bench.support.cluster import Cluster, eventually, serve
from tandem.client import Client

BUF = Path(sys.executable).with_name("buf")
PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text().split("## By hand: grpcurl")[1]
BLOCKS = re.findall(r"^```sh ?([^\n]*)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
ROUTER = "127.0.0.1:50051"
REFLECTION = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
TOKEN = "a-token-for-tests-0001"


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the page. `options` are as buf has them."""

    words: tuple[str, ...]
    mark: str

    def __str__(self) -> str:
        return " ".join(self.words[-2:])


def commands(*marks: str) -> list[Command]:
    """The page's commands in blocks that bear one of these marks."""
    lines = [
        (mark, line)
        for mark, block in BLOCKS
        if mark.split("=")[0] in marks
        for line in block.replace("\\\n", " ").split("grpcurl ")[1:]
    ]
    return [Command(tuple(shlex.split(line)), mark) for mark, line in lines]


@dataclass(frozen=True, slots=True)
class Place:
    """What the addresses and files of the page stand for."""

    addresses: dict[str, str]
    files: dict[str, str]


def run(command: Command, place: Place) -> subprocess.CompletedProcess[str]:
    """Runs it as buf would have it. Endless ones are cut off after what `-max-time` says."""
    options, words, max_time_s = ["--emit-defaults"], list(command.words), 60.0
    scheme = "https"
    while words[0].startswith("-"):
        flag = words.pop(0)
        match flag:
            case "-plaintext":
                scheme = "http"
                options.append("--http2-prior-knowledge")
            case "-max-time":
                max_time_s = float(words.pop(0))
            case "-cacert" | "-cert" | "-key":
                options += [f"-{flag}", place.files[words.pop(0)]]
            case "-H":  # grpcurl sends it with its questions to reflection, too
                header = words.pop(0).replace("$TOKEN", TOKEN)
                options += ["-H", header, "--reflect-header", header]
            case "-d":
                options += ["-d", words.pop(0)]
            case _:
                raise AssertionError(f"the test does not know {flag}")
    address = place.addresses[words.pop(0)]
    arguments = [str(BUF), "curl", "--protocol", "grpc", *options, *_action(words, f"{scheme}://{address}")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=max_time_s)
    except subprocess.TimeoutExpired as cut:
        if not cut.output:  # on a busy machine it may only be starting
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)
        process.terminate()
        output, errors = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def _action(words: list[str], url: str) -> list[str]:
    match words:
        case ["list"]:
            return ["--list-services", url]
        case ["list", _]:
            return ["--list-methods", url]
        case ["describe", symbol]:
            return ["-d", json.dumps({"fileContainingSymbol": symbol}), f"{url}/{REFLECTION}"]
        case [method]:
            return [f"{url}/{method}"]
    raise AssertionError(f"the test does not know {words}")


@pytest.fixture
def place(demo_cluster: Cluster, client: Client) -> Place:
    return Place({ROUTER: demo_cluster.target}, {})


@pytest.fixture(scope="module")
def tls_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, authority, files = tmp_path_factory.mktemp("tls"), trustme.CA(), {}
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    for name, text in (
        ("tls.crt", b"".join(each.bytes() for each in certificate.cert_chain_pems)),
        ("tls.key", certificate.private_key_pem.bytes()),
        ("ca.crt", authority.cert_pem.bytes()),
        ("tokens", TOKEN.encode()),
    ):
        (folder / name).write_bytes(text)
        files[name] = str(folder / name)
    security = (
        *("--tls-cert", files["tls.crt"], "--tls-key", files["tls.key"], "--tls-ca", files["ca.crt"]),
        *("--token-file", files["tokens"]),
    )
    with serve("demo", *security) as cluster:
        yield Place({ROUTER: cluster.target}, files)


def test_every_block_of_the_page_is_tried() -> None:
    tried = commands("", "status", "own-cluster", "endless", "tls")

    assert len(tried) == len(re.findall(r"^grpcurl ", PAGE, flags=re.MULTILINE)) > 20


@pytest.mark.parametrize("command", commands(""), ids=str)
def test_a_command_of_the_page_answers(command: Command, place: Place) -> None:
    done = run(command, place)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "errorResponse" not in done.stdout  # what reflection says of a symbol that is not there
    if "list" in command.words[:-1]:
        assert f"{command.words[-1]}/" in done.stdout  # its methods


@pytest.mark.parametrize("command", commands("status"), ids=str)
def test_a_mistake_is_answered_with_its_status(command: Command, place: Place) -> None:
    done = run(command, place)

    assert done.returncode != 0
    assert json.loads(done.stderr)["code"] == command.mark.removeprefix("status=").lower()


@pytest.mark.parametrize("command", commands("endless"), ids=str)
def test_an_endless_command_tells_the_state_at_once(command: Command, place: Place) -> None:
    assert json.loads(run(command, place).stdout) == {"status": "SERVING"}


@pytest.mark.parametrize("command", commands("own-cluster"), ids=str)
def test_a_worker_is_drained_by_hand(command: Command) -> None:
    with serve("demo") as cluster, Client(cluster.target) as client:
        done = run(command, Place({ROUTER: cluster.target}, {}))

        assert done.returncode == 0, done.stderr
        assert eventually(lambda: any(worker.load.draining for worker in client.status().workers))


def test_commands_with_tls_and_token_answer(tls_place: Place) -> None:
    for command in commands("tls"):
        done = run(command, tls_place)
        assert done.returncode == 0, (str(command), done.stderr)


def test_without_the_token_no_command_answers(tls_place: Place) -> None:
    for command in commands("tls"):
        bare = Command(tuple(word for word in command.words if not word.startswith(("-H", "authorization"))), "")
        done = run(bare, tls_place)
        assert done.returncode != 0
        assert not done.stdout
