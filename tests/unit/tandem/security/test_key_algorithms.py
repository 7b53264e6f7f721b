"""Keys of certificates: OpenSSL takes more kinds of them than gRPC, and only those of both will do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shell.rpc.server import RpcServer
from tandem.errors import ConfigError
from tandem.rpc.channel import open_channel
from tandem.security.credentials import Incoming, Outgoing
from tandem.security.tls import ClientTls, ServerTls
from tests.pki import LOOPBACK, Identity, Pki
from tests.programs import program

TIMEOUT_S = 20.0
CURVE = "ec_paramgen_curve:"
SPOKEN = [
    pytest.param(["rsa:2048"], id="RSA"),
    pytest.param(["ec", "-pkeyopt", CURVE + "prime256v1"], id="P-256"),
    pytest.param(["ec", "-pkeyopt", CURVE + "secp384r1"], id="P-384"),
]
NOT_SPOKEN = [
    pytest.param(["ec", "-pkeyopt", CURVE + "secp521r1"], id="P-521"),
    pytest.param(["ec", "-pkeyopt", CURVE + "secp256k1"], id="secp256k1"),
    pytest.param(["ec", "-pkeyopt", CURVE + "prime256v1", "-pkeyopt", "ec_param_enc:explicit"], id="P-256 spelt out"),
    pytest.param(["ed25519"], id="Ed25519"),
    pytest.param(["rsa-pss", "-pkeyopt", "rsa_keygen_bits:2048"], id="RSA for PSS only"),
]


def self_signed(folder: Path, algorithm: list[str]) -> Identity:
    """A certificate for 127.0.0.1 that vouches for itself."""
    identity = Identity(str(folder / "own.crt"), str(folder / "own.key"))
    subject = ["-subj", "/CN=t", "-addext", f"subjectAltName=IP:{LOOPBACK}"]
    command = [program("openssl"), "req", "-x509", "-nodes", "-newkey", *algorithm, *subject]
    subprocess.run([*command, "-keyout", identity.key, "-out", identity.cert], check=True, capture_output=True)
    return identity


@pytest.mark.parametrize("algorithm", SPOKEN)
async def test_what_is_accepted_shakes_hands(tmp_path: Path, algorithm: list[str]) -> None:
    own = self_signed(tmp_path, algorithm)
    server = RpcServer(f"{LOOPBACK}:0", [], incoming=Incoming(ServerTls(own.cert, own.key, own.cert)), announce_s=0)
    address = f"{LOOPBACK}:{await server.start()}"
    outgoing = Outgoing(ClientTls(own.cert, own.cert, own.key))
    try:
        async with open_channel(address, outgoing) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert isinstance(await check, health_pb2.HealthCheckResponse)
    finally:
        await server.drain(0)


@pytest.mark.parametrize("algorithm", NOT_SPOKEN)
def test_what_grpc_does_not_speak_is_refused_at_the_start(tmp_path: Path, algorithm: list[str]) -> None:
    own = self_signed(tmp_path, algorithm)

    for load in (lambda: ServerTls(own.cert, own.key), lambda: ClientTls(own.cert, own.cert, own.key)):
        with pytest.raises(ConfigError, match="RSA") as refused:
            load()
        assert refused.value.field == "--tls-cert"


def test_a_rotation_to_such_a_key_leaves_the_old_one_in_use(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = pki.issue()
    tls = pki.server(shown)
    before = tls.pem()
    shown.show(self_signed(tmp_path, ["ed25519"]))

    assert tls.pem() is before
    assert "RSA" in str(caplog.records[0].fields)  # type: ignore[attr-defined]
