"""TLS contexts: who is let in, what is refused at the start, and what a change of files does."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.security.tls import ClientTls, ServerTls
from tests.pki import LOOPBACK, Pki, replace_by_copy, replace_file
from tests.programs import program

TIMEOUT_S = 20.0


@asynccontextmanager
async def echo(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that says back each line, on one context for good; yields its port."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(talk, LOOPBACK, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


class Caller:
    """One connection to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int, tls: ClientTls) -> Caller:
        """Raises ssl.SSLError, ConnectionError."""
        caller = cls(*await asyncio.open_connection(LOOPBACK, port, ssl=tls.context()))
        try:
            await caller.say("hello")  # with TLS 1.3, a server's refusal comes with the first answer
        except BaseException:
            caller.drop()
            raise
        return caller

    async def say(self, text: str) -> None:
        self._writer.write(f"{text}\n".encode())
        async with asyncio.timeout(TIMEOUT_S):
            if await self._reader.readline() != f"{text}\n".encode():
                raise ConnectionResetError

    def drop(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def works(port: int, tls: ClientTls) -> bool:
    try:
        caller = await Caller.connect(port, tls)
    except (ssl.SSLError, ConnectionError):
        return False
    await caller.close()
    return True


async def test_new_connections_see_a_new_certificate_and_old_ones_go_on(pki: Pki, tmp_path: Path) -> None:
    shown, other = pki.issue(), Pki(tmp_path, "other")
    async with echo(pki.server(shown).serving_context()) as port:
        running = await Caller.connect(port, pki.caller())
        shown.show(other.issue())

        assert not await works(port, pki.caller())
        assert await works(port, other.caller())
        await running.say("still here")
        await running.close()


async def test_half_of_a_new_pair_changes_nothing(pki: Pki) -> None:
    shown, new = pki.issue(), pki.issue()
    async with echo(pki.server(shown).serving_context()) as port:
        replace_by_copy(shown.cert, new.cert)

        assert await works(port, pki.caller())

        replace_by_copy(shown.key, new.key)
        assert await works(port, pki.caller())


async def test_callers_without_a_certificate_of_the_authority_are_shut_out(pki: Pki, tmp_path: Path) -> None:
    shown = pki.issue()
    stranger = Pki(tmp_path, "other").issue("stranger")
    async with echo(pki.server(shown, mutual=True).serving_context()) as port:
        assert await works(port, pki.caller(pki.issue("friend")))
        assert not await works(port, pki.caller())
        assert not await works(port, pki.caller(stranger))
        assert not await works(port, pki.caller(pki.issue("friend", days=-1)))


async def test_an_authority_that_is_no_longer_trusted_vouches_for_nobody(pki: Pki, tmp_path: Path) -> None:
    shown, other = pki.issue(), Pki(tmp_path, "other")
    trusted = str(tmp_path / "trusted.pem")
    replace_by_copy(trusted, pki.ca)
    tls = ServerTls(shown.cert, shown.key, trusted)
    async with echo(tls.serving_context()) as port:
        assert await works(port, pki.caller(pki.issue("a")))
        replace_by_copy(trusted, other.ca)

        assert not await works(port, pki.caller(pki.issue("a")))
        assert await works(port, pki.caller(other.issue("b")))


def test_the_same_files_are_the_same_object(pki: Pki) -> None:
    shown = pki.issue()
    tls = pki.server(shown)

    assert tls.pem() is tls.pem()
    assert tls.context() is tls.context()

    before = tls.pem()
    shown.show(pki.issue())
    assert tls.pem() is not before


def test_a_broken_certificate_keeps_the_old_one(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    shown = pki.issue()
    tls = pki.server(shown)
    before = tls.pem()
    replace_file(shown.cert, b"-----BEGIN CERTIFICATE-----\nnonsense\n")

    assert tls.pem() is before
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_encrypted_key_is_refused_and_nobody_is_asked(pki: Pki) -> None:
    shown = pki.issue()
    locked = f"{shown.key}.locked"
    subprocess.run(
        [program("openssl"), "pkcs8", "-topk8", "-in", shown.key, "-out", locked, "-passout", "pass:secret"], check=True
    )

    with pytest.raises(ConfigError, match="encrypted") as refused:
        ServerTls(shown.cert, locked)
    assert refused.value.field == "--tls-key"


def test_a_key_of_another_certificate_is_refused(pki: Pki) -> None:
    with pytest.raises(ConfigError, match="no pair"):
        ServerTls(pki.issue().cert, pki.issue().key)


@pytest.mark.parametrize(
    "content", ["", "not PEM", "-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n"]
)
def test_authorities_that_hold_no_certificate_are_refused(pki: Pki, tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.pem"
    path.write_text(content)

    with pytest.raises(ConfigError, match="no certificates") as refused:
        ClientTls(str(path))
    assert refused.value.field == "--tls-ca"

    shown = pki.issue()
    with pytest.raises(ConfigError, match="no certificates") as refused:
        ServerTls(shown.cert, shown.key, str(path))
    assert refused.value.field == "--tls-client-ca"


def test_old_versions_of_tls_are_not_spoken(pki: Pki) -> None:
    for context in (pki.server(pki.issue()).context(), pki.caller().context(), ClientTls(None).context()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED or context.protocol == ssl.PROTOCOL_TLS_SERVER
