"""`tandem serve` with mutual TLS, tokens and KV over tcp: real processes, every one of their ports."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.support.cluster import Cluster, becomes_idle, eventually, run_command, serve
from bench.support.processes import children
from kvtransfer.frame import Frame, FrameType
from kvtransfer.handshake import Hello
from tandem.client import Client
from tandem.errors import Unauthenticated
from tandem.types import Incarnation, Role
from tests.finished_command import finished
from tests.listening import listening_ports
from tests.pki import LOOPBACK, OTHER_TOKEN, TOKEN, Identity, Pki, replace_file

PATIENCE_S = 10.0
PROMPT = "Once upon a time"
REQUESTS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5),  # HTTP/2's preface and empty SETTINGS
    Frame(
        FrameType.HELLO, payload=Hello(Incarnation("0" * 32), "tcp", 1, (), ()).encode()
    ).encode(),  # KV: answered by name
)
"""The first words of every protocol spoken on a port."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def shown(pki: Pki) -> Identity:
    """What all processes of the cluster show."""
    return pki.issue(LOOPBACK, "localhost")


@pytest.fixture(scope="module")
def tokens(pki: Pki) -> str:
    return pki.tokens(TOKEN)


@pytest.fixture(scope="module")
def cluster(pki: Pki, shown: Identity, tokens: str) -> Iterator[Cluster]:
    options = ["--tls-cert", shown.cert, "--tls-key", shown.key, "--tls-ca", pki.ca, "--tls-client-ca", pki.ca]
    with serve("demo", "--transport", "tcp", "--token-file", tokens, *options) as cluster:
        yield cluster


@pytest.fixture
def secure_client(cluster: Cluster, pki: Pki, tokens: str) -> Iterator[Client]:
    with Client(cluster.target, security=pki.client(pki.issue("a-client"), tokens)) as client:
        yield client
        assert becomes_idle(client), client.status()


@pytest.fixture
def command_line(pki: Pki, cluster: Cluster) -> list[str]:
    """The options of a command that is let in, but for the token."""
    identity = pki.issue("a-client")
    return ["--target", cluster.target, "--tls-ca", pki.ca, "--tls-cert", identity.cert, "--tls-key", identity.key]


def test_the_same_tokens_come_as_without_any_of_it(secure_client: Client, client: Client) -> None:
    ours = secure_client.complete(PROMPT, max_tokens=240, temperature=0.0)

    assert ours.choices == client.complete(PROMPT, max_tokens=240, temperature=0.0).choices
    assert ours.timings.transfer_bytes > 0


def test_every_port_of_every_process_speaks_tls_to_holders_of_a_certificate_only(
    secure_client: Client, pki: Pki, tmp_path: Path
) -> None:
    """Whatever listens: gRPC, registry, admin, KV. A port added later is found here too."""
    workers = secure_client.status().workers
    ports = {port for worker in workers for port in listening_ports(worker.info.pid)}
    ports |= listening_ports(parent_of(workers[0].info.pid)) | router_ports(workers[0].info.pid)
    decode = next(worker.info for worker in workers if worker.info.role is Role.DECODE)
    assert len(listening_ports(decode.pid)) >= 3  # gRPC, admin, KV
    assert {int(worker.info.address.rpartition(":")[2]) for worker in workers} <= ports

    for port in ports:
        assert answers_tls(port, caller_context(pki, pki.issue("a-client"))), port
        assert not answers_tls(port, caller_context(pki)), port
        assert not answers_tls(port, caller_context(pki, Pki(tmp_path, "stranger").issue("a-client"))), port
        with pytest.raises(ssl.SSLCertVerificationError):
            answers_tls(port, caller_context(Pki(tmp_path, "stranger")))
        assert not answers_in_clear(port), port


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def router_ports(worker_pid: int) -> set[int]:
    """Of the router, a child of the same parent."""
    router = children(parent_of(worker_pid))["router"]
    ports = listening_ports(router)
    assert len(ports) == 2  # gRPC, admin
    return ports


def caller_context(pki: Pki, identity: Identity | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pki.ca)
    context.set_alpn_protocols(["h2"])  # without it gRPC refuses even friends
    if identity is not None:
        context.load_cert_chain(identity.cert, identity.key)
    return context


def answers_tls(port: int, context: ssl.SSLContext) -> bool:
    """Whether whoever listens answers in its own protocol: with TLS 1.3 we hear no sooner whether we were let in."""
    return any(answers(port, context, request) for request in REQUESTS)


def answers(port: int, context: ssl.SSLContext, request: bytes) -> bool:
    """Whether anything comes back but an alert or the end. Raises TimeoutError if neither does."""
    with (
        socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=LOOPBACK) as sock,
    ):
        try:
            sock.sendall(request)
            return len(sock.recv(1)) == 1
        except (ssl.SSLError, ConnectionError):
            return False


def answers_in_clear(port: int) -> bool:
    """Whether a plain request gets anything but TLS's refusal."""
    with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        try:
            while chunk := sock.recv(4096):
                answer += chunk
        except ConnectionError:
            pass
    return answer[:1] not in (b"", b"\x15")


@pytest.mark.parametrize(
    ("without", "said"),
    [
        (lambda line, pki: line, "a bearer token is needed"),
        (lambda line, pki: [*line, "--token-file", pki.tokens(OTHER_TOKEN)], "not one of those accepted"),
        (lambda line, pki: line[:4], "or a certificate of the caller"),
        (lambda line, pki: line[:2], "does the server want TLS"),
        (lambda line, pki: [*line[:2], "--tls"], "no authority"),
        (lambda line, pki: [*line, "--tls-server-name", "elsewhere.example"], "bears another name"),
    ],
    ids=["no token", "wrong token", "no certificate", "plain", "other authorities", "another name"],
)
def test_whoever_lacks_something_is_told_in_one_line(
    command_line: list[str], tmp_path: Path, without: Callable[[list[str], Pki], list[str]], said: str
) -> None:
    refused = finished("generate", PROMPT, *without(command_line, Pki(tmp_path)))

    assert refused.returncode == 1
    assert said in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert refused.stdout == ""


def test_health_needs_a_certificate_but_no_token_and_reads_the_environment(cluster: Cluster, pki: Pki) -> None:
    """As an exec probe in a container whose environment configures the server."""
    identity = pki.issue("a-probe")
    environment = {"TANDEM_TLS_CA": pki.ca, "TANDEM_TLS_CERT": identity.cert, "TANDEM_TLS_KEY": identity.key}

    serving = finished("health", "--target", cluster.target, **environment)
    unknown = finished("health", "--target", cluster.target, "--service", "nobody", **environment)
    refused = finished("health", "--target", cluster.target)

    assert (serving.returncode, serving.stdout) == (0, "SERVING\n")
    assert (unknown.returncode, unknown.stdout) == (1, "NOT_SERVING\n")
    assert refused.returncode == 1


def test_a_stream_outlives_the_change_of_the_certificate_it_began_with(
    secure_client: Client, cluster: Cluster, pki: Pki, shown: Identity
) -> None:
    port = int(cluster.target.rpartition(":")[2])
    context = caller_context(pki, pki.issue("a-client"))
    before = certificate_at(port, context)
    options = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
    expected = secure_client.complete(PROMPT, **options).choices[0].token_ids

    updates = secure_client.generate(PROMPT, **options)
    received = list(next(updates).token_ids)
    shown.show(pki.issue(LOOPBACK, "localhost"))
    after = certificate_at(port, context)
    received += [token for update in updates for token in update.token_ids]

    assert after != before
    assert tuple(received) == tuple(expected)


def certificate_at(port: int, context: ssl.SSLContext) -> bytes:
    with (
        socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=LOOPBACK) as sock,
    ):
        return sock.getpeercert(binary_form=True) or b""


def test_tokens_are_rotated_under_a_running_cluster(cluster: Cluster, pki: Pki, tokens: str) -> None:
    """New behind old, then new alone: neither callers nor the processes among themselves are shut out."""
    identity = pki.issue("a-client")
    newcomers = str(Path(tokens).with_name("newcomers"))
    replace_file(newcomers, f"{OTHER_TOKEN}\n".encode())
    with (
        Client(cluster.target, security=pki.client(identity, newcomers)) as newcomer,
        Client(cluster.target, security=pki.client(identity, tokens)) as client,
    ):
        with pytest.raises(Unauthenticated):
            newcomer.model()
        replace_file(tokens, f"{TOKEN}\n{OTHER_TOKEN}\n".encode())
        newcomer.model()
        replace_file(tokens, f"{OTHER_TOKEN}\n".encode())
        newcomer.model()
        client.model()  # brings what stands first in the same file
        assert newcomer.complete(PROMPT, max_tokens=3).usage.completion_tokens > 0
        replace_file(tokens, f"{TOKEN}\n".encode())
        with pytest.raises(Unauthenticated):
            newcomer.model()


@pytest.mark.parametrize("command", ["serve", "router", "decode", "prefill"])
def test_no_process_listens_beyond_loopback_unprotected(command: str) -> None:
    refused = finished(command, "--model", "demo", "--listen", "0.0.0.0:0")

    assert refused.returncode == 2
    assert "--listen: other machines can reach 0.0.0.0:0" in refused.stderr
    assert "--insecure" in refused.stderr


def test_mutual_tls_alone_is_enough_beyond_loopback(pki: Pki, shown: Identity) -> None:
    mutual = ("--tls-cert", shown.cert, "--tls-key", shown.key, "--tls-ca", pki.ca, "--tls-client-ca", pki.ca)
    with run_command("router", "--model", "demo", "--listen", "0.0.0.0:0", *mutual) as router:
        asked = ("health", "--target", f"{LOOPBACK}:{router.target.rpartition(':')[2]}", "--tls-ca", pki.ca)
        assert finished(*asked, "--tls-cert", shown.cert, "--tls-key", shown.key).stdout == "NOT_SERVING\n"
        stranger = finished(*asked)
        assert stranger.returncode != 0
        assert "SERVING" not in stranger.stdout


def test_a_worker_takes_its_token_to_no_router_elsewhere_in_clear(tokens: str) -> None:
    refused = finished("decode", "--router", "192.0.2.1:50051", "--token-file", tokens)

    assert refused.returncode == 2
    assert refused.stderr.startswith("tandem: --router: the token of --token-file would cross the network")


def test_the_cluster_lost_nobody_on_the_way(cluster: Cluster, pki: Pki, tokens: str) -> None:
    with Client(cluster.target, security=pki.client(pki.issue("a-client"), tokens)) as client:
        assert eventually(lambda: sum(worker.connected for worker in client.status().workers) == 2)
    assert not [line for line in cluster.log if "child ended" in line or "worker lost" in line]
