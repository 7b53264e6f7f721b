from __future__ import annotations

import socket

import pytest

from shell.rpc.address import advertised_address, advertised_admin_address


def test_the_bound_port_replaces_port_zero() -> None:
    assert advertised_address("127.0.0.1:0", None, 4711) == "127.0.0.1:4711"
    assert advertised_address("0.0.0.0:0", "worker.local:0", 4711) == "worker.local:4711"
    assert advertised_address("0.0.0.0:1", "worker.local:9", 1) == "worker.local:9"


OWN_NAME = "machine"
"""It has no address, but in the test below."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Addresses of names, as this machine looks them up; a test may add some."""
    addresses: dict[str, str] = {}

    def look_up(name: str) -> str:
        if name not in addresses:
            raise socket.gaierror(name)
        return addresses[name]

    monkeypatch.setattr(socket, "gethostname", lambda: OWN_NAME)
    monkeypatch.setattr(socket, "gethostbyname", look_up)
    return addresses


def test_a_wildcard_is_told_as_the_machines_address_unless_that_is_of_use_to_itself_alone(
    machine: dict[str, str],
) -> None:
    assert advertised_address("[::]:7", None, 7) == "machine:7"
    machine[OWN_NAME] = "127.0.1.1"
    assert advertised_address("0.0.0.0:7", None, 7) == "machine:7"
    machine[OWN_NAME] = "10.1.2.3"
    assert advertised_address("0.0.0.0:7", None, 7) == "10.1.2.3:7"


@pytest.mark.parametrize(
    ("listen", "advertise", "address"),
    [
        ("127.0.0.1:0", None, "127.0.0.1:4711"),
        ("127.0.0.1:0", "worker.local:9", "127.0.0.1:4711"),
        ("0.0.0.0:0", "worker.local:9", "worker.local:4711"),
        ("[::]:4711", "[fd00::1]:9", "[fd00::1]:4711"),
        ("0.0.0.0:4711", None, "machine:4711"),
    ],
)
def test_the_admin_port_is_told_with_the_advertised_host_where_it_listens_on_all(
    listen: str, advertise: str | None, address: str
) -> None:
    assert advertised_admin_address(listen, advertise, 4711) == address
