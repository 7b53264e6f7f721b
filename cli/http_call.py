"""Calls of a process's own to an HTTP door on this machine: whether it lives, and whether it has a model."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

from cli.liveness import HealthClient
from shell.rpc.address import local_address
from tandem.errors import DeadlineExceeded, Reason, TandemError, Unavailable
from tandem.security.credentials import Outgoing
from tandem.security.tls import ClientTls


class HttpCaller:
    """Calls one address, with the certificate and token of `outgoing` as they are at each call."""

    def __init__(self, address: str, outgoing: Outgoing) -> None:
        host, _, port = local_address(address).rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._outgoing = outgoing

    def answer(self, path: str, timeout_s: float, body: object = None) -> tuple[int, bytes]:
        """Status and body of an answer; a `body` is posted as JSON. Raises OSError, TimeoutError among them."""
        headers = {"Content-Type": "application/json", **dict(self._outgoing.metadata())}
        connection = _Connection(self._host, self._port, timeout_s, self._outgoing.tls)
        try:
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        except HTTPException as error:
            raise OSError(f"{self._host}:{self._port} does not speak HTTP") from error
        finally:
            connection.close()

    def model(self, timeout_s: float) -> str | None:
        """The model that the door says it has; None while it has none. Raises as `answer`."""
        status, models = self.answer("/v1/models", timeout_s)
        known = json.loads(models).get("data") if status == 200 else None
        return known[0]["id"] if known else None


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
    """A `cli.liveness.HealthClient` that asks an HTTP door whether requests come through."""

    def __init__(
        self, address: str, outgoing: Outgoing, router: Callable[[], AbstractAsyncContextManager[HealthClient]]
    ) -> None:
        """`router` makes what asks the router behind the door."""
        self._address = address
        self._caller = HttpCaller(address, outgoing)
        self._router = router

    async def __aenter__(self) -> HttpHealth:
        return self

    async def __aexit__(self, *exception: object) -> None: ...

    async def serving(self, service: str, *, timeout_s: float) -> bool:
        """Whatever the `service`. Raises Unavailable, DeadlineExceeded.

        False if the door lives and refuses what the router, which serves, does not hear of.
        """
        try:
            status, _ = await asyncio.to_thread(self._caller.answer, "/liveness", timeout_s / 2)
            return status == 200 and (await self._comes_through(timeout_s / 2) or not await self._serves(timeout_s))
        except TimeoutError:
            raise DeadlineExceeded(f"{self._address} gives no answer") from None
        except ssl.SSLError as error:  # it answers, by a certificate that does not fit what the files hold by now
            raise Unavailable(str(error), Reason.TLS_FAILED) from error
        except OSError as error:
            raise Unavailable(str(error), Reason.PEER_LOST) from error

    async def _comes_through(self, timeout_s: float) -> bool:
        """Whether a request to generate reaches the router. One that is slow, as under load, is no sign against it."""
        try:
            return await asyncio.to_thread(self._is_refused_by_router, timeout_s)
        except TimeoutError:
            return True

    def _is_refused_by_router(self, timeout_s: float) -> bool:
        """Sends what the door takes and the router refuses: it costs no seat, no token and no place in the queue."""
        model = self._caller.model(timeout_s)
        if model is None:
            return False
        status, _ = self._caller.answer("/v1/completions", timeout_s, {"model": model, "prompt": "a", "max_tokens": 0})
        return status == HTTPStatus.BAD_REQUEST

    async def _serves(self, timeout_s: float) -> bool:
        try:
            async with self._router() as router:
                return await router.serving("", timeout_s=timeout_s)
        except TandemError:
            return False
