"""From options to what a process shows and asks."""

from __future__ import annotations

import dataclasses

import pytest

from tandem.errors import ConfigError
from tandem.security.credentials import Outgoing, Security
from tandem.security.options import ClientSecurityConfig, SecurityConfig, client_side
from tests.pki import TOKEN, Pki

PORTS = (("--listen", "127.0.0.1:0"),)


def test_nothing_given_is_plain_both_ways() -> None:
    security = Security.load(SecurityConfig(), PORTS)

    assert security == Security()
    assert security.outgoing.metadata() == ()


def test_everything_given_guards_ports_and_goes_with_calls(pki: Pki) -> None:
    config = pki.process(pki.issue(), mutual=True, tokens=pki.tokens(TOKEN))

    security = Security.load(config, (("--listen", "0.0.0.0:1"),))

    assert security.incoming.tls is not None
    assert security.incoming.tls.requires_client_certificate
    assert security.incoming.tokens is not None
    assert security.outgoing.tls is not None
    assert security.outgoing.metadata() == (("authorization", f"Bearer {TOKEN}"),)


@pytest.mark.parametrize(
    ("left_out", "named"), [("tls_cert", "--tls-cert"), ("tls_key", "--tls-key"), ("tls_ca", "--tls-ca")]
)
def test_certificate_key_and_authorities_go_together(pki: Pki, left_out: str, named: str) -> None:
    config = dataclasses.replace(pki.process(pki.issue()), **{left_out: None})

    with pytest.raises(ConfigError) as refused:
        Security.load(config, PORTS)

    assert refused.value.field == named


@pytest.mark.parametrize("option", ["tls_client_ca", "tls_server_name"])
def test_what_means_nothing_without_tls_is_refused(option: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Security.load(SecurityConfig(**{option: "x"}), PORTS)

    assert refused.value.field == "--" + option.replace("_", "-")


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"tls_cert": "/none"}, "--tls-cert"),
        ({"tls_key": "/none"}, "--tls-key"),
        ({"tls_ca": "/none"}, "--tls-ca"),
        ({"tls_client_ca": "/none"}, "--tls-client-ca"),
        ({"token_file": "/none"}, "--token-file"),
    ],
)
def test_a_file_that_is_not_there_is_named(pki: Pki, broken: dict[str, str], named: str) -> None:
    config = dataclasses.replace(pki.process(pki.issue(), mutual=True), **broken)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="cannot read /none") as refused:
        Security.load(config, PORTS)

    assert refused.value.field == named


@pytest.mark.parametrize("target", ["router.example:50051", "192.0.2.1:1", "dns:///router.example:1"])
def test_a_token_never_crosses_a_network_in_clear_by_itself(pki: Pki, target: str) -> None:
    with pytest.raises(ConfigError, match="in clear"):
        Outgoing.of_client(ClientSecurityConfig(token_file=pki.tokens()), target)


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({}, "127.0.0.1:1"),
        ({}, "ipv4:127.0.0.1:1,127.0.0.2:2"),
        ({}, "dns:///localhost:1"),
        ({"insecure": True}, "192.0.2.1:1"),
        ({"tls": True}, "192.0.2.1:1"),
    ],
)
def test_a_token_goes_by_tls_on_loopback_or_on_purpose(pki: Pki, changes: dict[str, bool], target: str) -> None:
    outgoing = Outgoing.of_client(ClientSecurityConfig(token_file=pki.tokens(TOKEN), **changes), target)  # type: ignore[arg-type]

    assert outgoing.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    assert (outgoing.tls is not None) == ("tls" in changes)


@pytest.mark.parametrize("router", ["router.example:50051", "192.0.2.1:1"])
def test_a_process_brings_its_token_to_no_other_machine_in_clear(pki: Pki, router: str) -> None:
    with pytest.raises(ConfigError, match="in clear") as refused:
        Security.load(
            SecurityConfig(token_file=pki.tokens()), PORTS, (("--router", "127.0.0.1:1"), ("--router", router))
        )

    assert refused.value.field == "--router"


def test_a_process_brings_its_token_by_tls_or_on_purpose(pki: Pki) -> None:
    tokens = pki.tokens(TOKEN)
    for config in (pki.process(pki.issue(), tokens=tokens), SecurityConfig(token_file=tokens, insecure=True)):
        outgoing = Security.load(config, PORTS, (("--router", "192.0.2.1:1"),)).outgoing

        assert not outgoing.shows_token_in_clear("192.0.2.1:1")
        assert outgoing.metadata() == (("authorization", f"Bearer {TOKEN}"),)


def test_a_clients_certificate_needs_its_key(pki: Pki) -> None:
    with pytest.raises(ConfigError, match="goes with --tls-key"):
        Outgoing.of_client(ClientSecurityConfig(tls_cert=pki.issue().cert), "127.0.0.1:1")


def test_a_process_can_be_called_with_its_own_files(pki: Pki) -> None:
    config = pki.process(pki.issue(), mutual=True, tokens=pki.tokens(TOKEN))

    outgoing = Outgoing.of_client(client_side(config), "127.0.0.1:1")

    assert outgoing.tls is not None
    assert outgoing.tls.pem().chain is not None
    assert outgoing.metadata() == (("authorization", f"Bearer {TOKEN}"),)
