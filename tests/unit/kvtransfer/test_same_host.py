"""Which processes of one machine can meet, and how those that cannot are told."""

import subprocess
import sys

import pytest

from kvtransfer.transports import same_host
from kvtransfer.transports.same_host import acceptor, elsewhere, namespace

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
DIAL = """
import asyncio, sys
from kvtransfer.transports import same_host
fields = dict(line.split("=", 1) for line in sys.argv[1:])
print(same_host.elsewhere(fields))
try:
    asyncio.run(same_host.dial(fields["unix_name"])).close()
    print("met")
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture
def fields():
    met = acceptor(lambda _: pytest.fail("nobody is accepted"), {})
    yield met.fields
    met.sock.close()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("boot_id", "another", "on another machine"),
        ("uid", "-1", "belongs to another user"),
        ("net_ns", "net:[1]", "in another network namespace"),
        ("pid_ns", "pid:[1]", "in another PID namespace"),
    ],
)
def test_whoever_cannot_be_met_is_told_by_reason(fields, name, value, reason):
    assert elsewhere(fields) is None
    assert reason in elsewhere(dict(fields) | {name: value})


def test_where_the_kernel_names_no_pidfd_of_a_peer_both_must_share_a_pid_namespace(monkeypatch):
    monkeypatch.setattr(same_host, "_SO_PEERPIDFD", 0x7FFF)
    met = acceptor(lambda _: pytest.fail("nobody is accepted"), {})
    met.sock.close()
    assert met.fields["pid_ns"] == namespace("pid")
    assert elsewhere(met.fields) is None


def said_in(namespace_option, fields) -> list[str]:
    """What a process in a namespace of its own says of the acceptor, and what comes of dialling it."""
    arguments = [f"{name}={value}" for name, value in fields.items()]
    command = ["unshare", *namespace_option, sys.executable, "-c", DIAL, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("this user may not make namespaces")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@LINUX
def test_another_network_namespace_is_named_and_its_socket_is_not_there(fields):
    assert said_in(["--net"], fields) == [
        "it is in another network namespace, where its Unix socket cannot be reached",
        "Connection refused",
    ]


@LINUX
@pytest.mark.parametrize("option", ["--pid", "--ipc"])
def test_pid_and_ipc_namespaces_keep_nobody_apart_where_the_kernel_names_pidfds(fields, option):
    if fields["pid_ns"]:
        pytest.skip("needs Linux 6.5")
    assert said_in([option, "--fork"], fields) == ["None", "met"]
