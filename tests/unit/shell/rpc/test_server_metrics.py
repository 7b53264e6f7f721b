"""What a server tells of itself when it is asked for metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from shell.rpc.health import SERVICE_NAME
from shell.rpc.server import RpcServer
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from tandem.security.credentials import Incoming
from tandem.security.tls import ServerTls
from tandem.security.tokens import Tokens
from tests.pki import TOKEN, Pki

EXPIRY = "tandem_tls_certificate_expiry_timestamp_seconds"


def value(metrics: Metrics, name: str) -> float | None:
    """Of a metric without labels."""
    lines = [line.split() for line in metrics.exposition()[0].decode().splitlines()]
    found = [float(line[1]) for line in lines if line[0] == name]
    return found[0] if found else None


def test_serving_is_what_it_was_told() -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    server = RpcServer("127.0.0.1:0", [], metrics=metrics)
    assert value(metrics, "tandem_serving") == 0
    server.set_serving(True)
    assert value(metrics, "tandem_serving") == 1


def test_the_end_of_a_certificate_is_told_and_follows_its_files(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    identity = pki.issue(days=3)
    metrics = Metrics(Process.ROUTER, "demo")
    RpcServer("127.0.0.1:0", [], incoming=Incoming(ServerTls(identity.cert, identity.key)), metrics=metrics)
    now_s = datetime.now(UTC).timestamp()
    assert value(metrics, EXPIRY) == pytest.approx(now_s + 3 * 86400, abs=120)
    identity.show(pki.issue(days=90))
    assert value(metrics, EXPIRY) == pytest.approx(now_s + 90 * 86400, abs=120)


def test_without_tls_nothing_ends() -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    RpcServer("127.0.0.1:0", [], metrics=metrics)
    assert value(metrics, EXPIRY) is None


async def test_a_caller_without_a_token_is_counted_without_a_method_of_its_choice(tmp_path: Path) -> None:
    metrics = Metrics(Process.ROUTER, "demo")
    incoming = Incoming(tokens=Tokens(Pki(tmp_path).tokens(TOKEN)))
    server = RpcServer("127.0.0.1:0", [], incoming=incoming, announce_s=0, metrics=metrics)
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name, code in (("/made.Up/Method", "UNAUTHENTICATED"), (f"/{SERVICE_NAME}/MadeUp", "UNIMPLEMENTED")):
                method: Any = channel.unary_unary(name)
                assert (await method(b"", timeout=5).code()).name == code
    finally:
        await server.drain(0)
    body = metrics.exposition()[0]
    assert b'tandem_grpc_server_calls_total{code="UNAUTHENTICATED",method="none",service="none"} 1.0' in body
    assert b'tandem_grpc_server_calls_total{code="UNIMPLEMENTED",method="none",service="none"} 1.0' in body
    assert b"made.Up" not in body
    assert b"MadeUp" not in body
