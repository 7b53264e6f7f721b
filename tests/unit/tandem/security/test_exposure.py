"""Loopback needs nothing; anything else needs TLS with tokens or callers' certificates, or --insecure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.errors import ConfigError
from tandem.security.exposure import check_exposure, is_loopback
from tandem.security.options import SecurityConfig

OPEN = (("--listen", "0.0.0.0:50051"), ("--admin-listen", None))
TLS = SecurityConfig(tls_cert="c", tls_key="k", tls_ca="a")
TRIO, WHO = "--tls-cert, --tls-key and --tls-ca", "--token-file or --tls-client-ca"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:0", "[::1]:1", "localhost:1"])
def test_loopback_is_this_machines_own(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "[2001:db8::1]:1", "no-such-name.invalid:1", "a" * 64 + ".b:1", ":1"],
)
def test_others_reach_everything_else(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (SecurityConfig(), f"{TRIO} and {WHO}"),
        (TLS, WHO),
        (SecurityConfig(token_file="t"), TRIO),
        (SecurityConfig(tls_client_ca="a"), TRIO),
        (SecurityConfig(tls_client_ca="a", token_file="t"), TRIO),
    ],
)
def test_half_of_it_is_not_enough_beyond_loopback(config: SecurityConfig, missing: str) -> None:
    with pytest.raises(ConfigError, match=f": give {missing}, or else --insecure") as refused:
        check_exposure(config, OPEN)

    assert refused.value.field == "--listen"


def test_the_admin_port_counts_too() -> None:
    with pytest.raises(ConfigError) as refused:
        check_exposure(SecurityConfig(), (("--listen", "127.0.0.1:1"), ("--admin-listen", "[::]:9090")))

    assert refused.value.field == "--admin-listen"


@pytest.mark.parametrize(
    ("config", "listens"),
    [
        (SecurityConfig(), (("--listen", "127.0.0.1:0"), ("--admin-listen", None))),
        (SecurityConfig(insecure=True), OPEN),
        (replace(TLS, token_file="t"), OPEN),
        (replace(TLS, tls_client_ca="a"), OPEN),
    ],
)
def test_what_is_protected_or_meant_may_listen(
    config: SecurityConfig, listens: tuple[tuple[str, str | None], ...]
) -> None:
    check_exposure(config, listens)
