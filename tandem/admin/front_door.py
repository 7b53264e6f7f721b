"""The admin port itself: one listener for HTTP/1.1 and gRPC, plain or TLS, with a bounded number of callers.

TLS ends here. Its ALPN offers `http/1.1` before `h2`: browsers and Prometheus, which speak both, take the
first; gRPC, which offers only `h2`, gets that. What is spoken is told from the bytes (see `connection`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from tandem.admin.connection import Connection, Patience
from tandem.errors import ConfigError
from tandem.security.tls import HANDSHAKE_TIMEOUT_S, ServerTls
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)

ALPN = ("http/1.1", "h2")
MAX_CONNECTIONS = 128
"""Half of them may be gRPC's, which last: so there is always room for a probe or a scrape."""
_BACKLOG = 64


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
        self._tls = tls
        self._max_connections = max_connections
        self._patience = patience or Patience()
        self._connections: set[Connection] = set()
        self._lasting: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def num_connections(self) -> int:
        """Callers that are here now."""
        return len(self._connections)

    async def open(self, listen: str) -> int:
        """Listens on HOST:PORT; returns the port. Raises ConfigError if the address cannot be had."""
        host, _, port = listen.rpartition(":")
        tls = None if self._tls is None else self._tls.serving_context(ALPN)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: Connection(self, self._patience),
                host.strip("[]"),
                int(port),
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
                backlog=_BACKLOG,
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
        for connection in tuple(self._connections):
            connection.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()

    def enter(self, connection: Connection) -> bool:
        """Whether there is room for one more."""
        return self._admit(connection, self._connections, self._max_connections)

    def stay(self, connection: Connection) -> bool:
        """Whether there is room for one more that lasts."""
        return self._admit(connection, self._lasting, self._max_connections // 2)

    def leave(self, connection: Connection) -> None:
        """It has ended."""
        self._connections.discard(connection)
        self._lasting.discard(connection)

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

    @staticmethod
    def _admit(connection: Connection, present: set[Connection], most: int) -> bool:
        if len(present) >= most:
            _log.warning("admin port: too many connections", most=most)
            return False
        present.add(connection)
        return True
