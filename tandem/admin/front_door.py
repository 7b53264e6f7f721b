"""The admin port itself: one listener for HTTP/1.1 and gRPC, plain or TLS, with a bounded number of callers.

TLS ends here. Its ALPN offers `http/1.1` before `h2`: browsers and Prometheus, which speak both, take the
first; gRPC, which offers only `h2`, gets that. What is spoken is told from the bytes (see `connection`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from tandem.admin.connection import Caller, Connection, Patience
from tandem.admin.handshake import Handshake
from tandem.errors import ConfigError
from tandem.security.tls import ServerTls
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)

ALPN = ("http/1.1", "h2")
MAX_CONNECTIONS = 128
"""Handshakes included. Half of them may be gRPC's, which last: so these alone never keep out a probe or a scrape."""
_BACKLOG = 64
_REMIND_S = 60.0
"""Callers that are turned away are worth one line in so long: strangers must not be able to fill the log."""


class FrontDoor:
    """Listens between `open` and `close`; a Doorman for its connections."""

    def __init__(
        self,
        http_handler: Callable[[], asyncio.Protocol],
        private_path: str,
        *,
        tls: ServerTls | None = None,
        max_connections: int = MAX_CONNECTIONS,
        patience: Patience | None = None,
    ) -> None:
        """`private_path` is the Unix socket of the gRPC server behind."""
        self._http_handler = http_handler
        self._private_path = private_path
        self._context = None if tls is None else tls.serving_context(ALPN)
        self._max_connections = max_connections
        self._patience = patience or Patience()
        self._callers: set[Caller] = set()
        self._lasting: set[Caller] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._quiet_until_s = 0.0
        self._server: asyncio.Server | None = None

    @property
    def num_connections(self) -> int:
        """Callers that are here now."""
        return len(self._callers)

    async def open(self, listen: str) -> int:
        """Listens on HOST:PORT; returns the port. Raises ConfigError if the address cannot be had."""
        host, _, port = listen.rpartition(":")
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._greet, host.strip("[]"), int(port), backlog=_BACKLOG
            )
        except OSError as error:
            raise ConfigError("--admin-listen", f"cannot listen on {listen}: {error.strerror or error}") from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Refuses new callers, cuts off those that are here, and returns when all of it has ended. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        await asyncio.sleep(0)  # a task that is cancelled before it began cannot clean up
        for caller in tuple(self._callers):
            caller.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()

    def enter(self, caller: Caller) -> bool:
        """Whether there is room for one more."""
        return self._admit(caller, self._callers, self._max_connections)

    def stay(self, caller: Caller) -> bool:
        """Whether there is room for one more that lasts."""
        return self._admit(caller, self._lasting, self._max_connections // 2)

    def leave(self, caller: Caller) -> None:
        """It has ended."""
        self._callers.discard(caller)
        self._lasting.discard(caller)

    def http_handler(self) -> asyncio.Protocol:
        """What handles one HTTP/1 connection."""
        return self._http_handler()

    async def dial(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        """A new connection to the private gRPC server. Raises OSError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._patience.dial_s):
            transport, _ = await loop.create_unix_connection(lambda: protocol, self._private_path)
        return transport

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs it as a task that does not outlive the port."""
        task = asyncio.get_running_loop().create_task(work, name="admin-pipe")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _greet(self) -> asyncio.Protocol:
        connection = Connection(self, self._patience)
        if self._context is None:
            return connection
        return Handshake(self, connection, self._context, self._patience.handshake_s)

    def _admit(self, caller: Caller, present: set[Caller], most: int) -> bool:
        if self._server is None:
            return False
        if len(present) >= most:
            self._warn(most)
            return False
        present.add(caller)
        return True

    def _warn(self, most: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _REMIND_S
            _log.warning("admin port: too many connections; more are refused", most=most)
