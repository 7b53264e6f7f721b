"""Calls of a process's own to an HTTP door on this machine: whether it lives, and whether it has a model."""

from __future__ import annotations

import asyncio
import socket
import ssl
from http.client import HTTPConnection, HTTPException
from types import TracebackType

from tandem.errors import DeadlineExceeded, Reason, Unavailable
from tandem.rpc.address import local_address
from tandem.security.credentials import Outgoing
from tandem.security.tls import ClientTls


class HttpCaller:
    """Calls one address, with the certificate and token of `outgoing` as they are at each call."""

    def __init__(self, address: str, outgoing: Outgoing) -> None:
        host, _, port = local_address(address).rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._outgoing = outgoing

    def answer(self, path: str, timeout_s: float, body: bytes | None = None) -> bytes | None:
        """The body of an answer 200, else None; a JSON `body` is posted. Raises OSError, TimeoutError among them."""
        headers = {"Content-Type": "application/json", **dict(self._outgoing.metadata())}
        connection = _Connection(self._host, self._port, timeout_s, self._outgoing.tls)
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            content = response.read()
        except HTTPException as error:
            raise OSError(f"{self._host}:{self._port} does not speak HTTP") from error
        finally:
            connection.close()
        return content if response.status == 200 else None


class _Connection(HTTPConnection):
    """By TLS if there is any, where the certificate may bear another name than the address."""

    def __init__(self, host: str, port: int, timeout_s: float, tls: ClientTls | None) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._tls = tls

    def connect(self) -> None:
        super().connect()
        if self._tls is not None:
            sock: socket.socket = self.sock
            self.sock = self._tls.context().wrap_socket(sock, server_hostname=self._tls.server_name or self.host)


class HttpHealth:
    """Asks an HTTP door whether it lives: a `cli.liveness.HealthClient`."""

    def __init__(self, address: str, outgoing: Outgoing) -> None:
        self._address = address
        self._caller = HttpCaller(address, outgoing)

    async def __aenter__(self) -> HttpHealth:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    async def serving(self, service: str, *, timeout_s: float) -> bool:
        """Whatever the `service`. Raises Unavailable, DeadlineExceeded."""
        try:
            return await asyncio.to_thread(self._caller.answer, "/liveness", timeout_s) is not None
        except TimeoutError:
            raise DeadlineExceeded(f"{self._address} gives no answer") from None
        except ssl.SSLError as error:  # it answers, by a certificate that does not fit what the files hold by now
            raise Unavailable(str(error), Reason.TLS_FAILED) from error
        except OSError as error:
            raise Unavailable(str(error), Reason.PEER_LOST) from error
