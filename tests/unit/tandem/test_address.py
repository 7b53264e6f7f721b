from __future__ import annotations

import socket

from tandem.rpc.address import advertised_address


def test_the_bound_port_replaces_port_zero() -> None:
    assert advertised_address("127.0.0.1:0", None, 4711) == "127.0.0.1:4711"
    assert advertised_address("0.0.0.0:0", "worker.local:0", 4711) == "worker.local:4711"


def test_what_is_advertised_wins() -> None:
    assert advertised_address("0.0.0.0:1", "worker.local:9", 1) == "worker.local:9"


def test_a_wildcard_is_told_as_the_machines_name() -> None:
    assert advertised_address("[::]:7", None, 7) == f"{socket.gethostname()}:7"
