"""What `--http` needs, and what its process is told."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import pytest

from cli.http_door import _words, check_http
from cli.serve import http_spec
from shell.config import HttpDoorConfig, RouterConfig, ServeConfig, add_arguments, load
from tandem.errors import ConfigError
from tandem.security.options import SecurityConfig, client_side


def config(http: str | None, **security: Any) -> ServeConfig:
    return ServeConfig(http=http, router=RouterConfig(security=SecurityConfig(**security)))


def read(cls: type[Any], *argv: str) -> Any:
    parser = argparse.ArgumentParser()
    add_arguments(parser, cls)
    return load(cls, parser.parse_args(argv), {})


def test_a_door_on_loopback_is_fine() -> None:
    check_http(config("127.0.0.1:0"))
    check_http(config("127.0.0.1:0", token_file="tokens"))
    check_http(config("127.0.0.1:0", tls_cert="tls.crt", tls_client_ca="ca.crt"))
    check_http(config(None, token_file="tokens"))


def test_beyond_loopback_it_has_tls_and_asks_for_a_token_or_is_meant_to_be_open() -> None:
    check_http(config("0.0.0.0:8080", tls_cert="tls.crt", token_file="tokens"))
    check_http(config("0.0.0.0:8080", insecure=True))


@pytest.mark.parametrize(
    "security", [{}, {"token_file": "tokens"}, {"tls_cert": "tls.crt"}, {"tls_cert": "tls.crt", "tls_client_ca": "ca"}]
)
def test_half_of_it_is_not_enough_beyond_loopback(security: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--http: other machines can reach 0.0.0.0:8080: .* --token-file"):
        check_http(config("0.0.0.0:8080", **security))


def test_the_door_is_told_how_to_call_the_router() -> None:
    secured = config("127.0.0.1:0", tls_cert="c", tls_key="k", tls_ca="a", tls_client_ca="b", token_file="t")
    spec = http_spec(secured, "127.0.0.1:0", "127.0.0.1:50051", [0])
    door = read(HttpDoorConfig, *spec.arguments)
    assert (door.listen, door.router) == ("127.0.0.1:0", "127.0.0.1:50051")
    assert spec.stop_grace_s > door.drain_grace_s == secured.router.drain_grace_s
    assert door.security == client_side(secured.router.security)


def test_without_the_gateway_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the extra `http`"):
        check_http(config("127.0.0.1:0"))


def test_the_gateway_gets_the_options_that_are_meant_for_it() -> None:
    given = ServeConfig(
        http="127.0.0.1:0",
        http_gateway=("tool-call-parser=qwen", "cors-allowed-origins=https://a", "cors-allowed-origins=https://b"),
        router=RouterConfig(chat_template="chat.jinja", log_format="json"),
    )
    spec = http_spec(given, "127.0.0.1:0", "127.0.0.1:50051", [0])
    words = _words(read(HttpDoorConfig, *spec.arguments).gateway)
    assert words == [
        *("--chat-template", "chat.jinja", "--log-json", "--tool-call-parser", "qwen"),
        *("--cors-allowed-origins", "https://a", "https://b"),
    ]


@pytest.mark.parametrize("word", ["worker-urls=grpc://stranger:1", "control-plane-api-keys=a:b:admin:c", "--parser"])
def test_no_option_of_the_gateway_is_passed_on_that_says_whom_it_calls_or_who_may_call_it(word: str) -> None:
    with pytest.raises(ConfigError, match="--http-gateway"):
        read(ServeConfig, f"--http-gateway={word}")
