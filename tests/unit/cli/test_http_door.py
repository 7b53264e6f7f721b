from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from cli.http_door import check_http
from tandem.config import RouterConfig, ServeConfig
from tandem.errors import ConfigError
from tandem.security.options import SecurityConfig


def config(http: str | None, **security: Any) -> ServeConfig:
    return ServeConfig(http=http, router=RouterConfig(security=SecurityConfig(**security)))


def test_a_door_on_loopback_is_fine() -> None:
    check_http(config("127.0.0.1:0"))
    check_http(config("0.0.0.0:8080", insecure=True))
    check_http(config(None, token_file="tokens"))


@pytest.mark.parametrize(
    ("http", "security", "words"),
    [
        ("0.0.0.0:8080", {}, "beyond loopback"),
        ("127.0.0.1:0", {"token_file": "tokens"}, "neither a token nor TLS"),
        ("127.0.0.1:0", {"tls_cert": "tls.crt"}, "neither a token nor TLS"),
    ],
)
def test_what_the_gateway_cannot_do_is_refused(http: str, security: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_http(config(http, **security))


def test_without_the_gateway_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tandem-serving\[http\]"):
        check_http(config("127.0.0.1:0"))
