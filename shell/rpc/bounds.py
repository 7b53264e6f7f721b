"""What callers can take up on a gRPC port before they have shown a token: every bound on it.

gRPC enforces `connection_options`. Calls that need no token (health's) are bounded by `TokenlessCalls`; a port
without tokens has none of those, since there every caller may call everything. Not bounded: how many of the
port's connections one caller opens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from shell.rpc.handlers import Context, Handler, behaviour_of, with_behaviour
from shell.rpc.status import abort_with
from tandem.errors import DeadlineExceeded, InvalidRequest, Overloaded
from tandem.rpc.channel import ChannelOptions
from tandem.security.tls import HANDSHAKE_TIMEOUT_S

MAX_CONNECTIONS = 4096
"""Most connections, handshakes in progress included; further connections are closed at once."""
MAX_STREAMS_PER_CONNECTION = 4096
MAX_METADATA_BYTES = 64 * 1024
MAX_PENDING_CALLS = 65536
"""Calls that came in and that the event loop has not taken up yet; also those that were reset since. gRPC ends further
ones as CANCELLED without details, whoever makes them. So many that the loop answers a burst itself: it says when to
come back."""
MAX_PENDING_S = 3600
"""gRPC cancels a call that is not taken up for so long; its own deadline ends it sooner."""
MAX_IDLE_S = 30 * 60.0
"""A connection without calls for this long is closed; its client connects again at its next call."""
MAX_TOKENLESS_CALLS = 8
"""At a time, on one connection: a probe makes one call, a client that heeds health one Watch."""
TOKENLESS_REQUEST_S = 5.0
"""From the call to its whole request."""
MAX_TOKENLESS_REQUEST_BYTES = 1024


def connection_options() -> ChannelOptions:
    """For a server."""
    return [
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),  # from here on some are refused,
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),  # and from here on all
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
        ("grpc.max_connection_idle_ms", int(MAX_IDLE_S * 1000)),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
    ]


class TokenlessCalls:
    """Counts the calls without a token by connection."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    def bounded(self, handler: Handler) -> Handler:
        """The same method, which takes one request, for a caller without a token; `handler` is one of `CallGuard`'s."""
        behaviour = behaviour_of(handler)

        async def call(_requests: object, context: Context) -> None:
            connection = context.peer()
            if self._running[connection] >= MAX_TOKENLESS_CALLS:
                await abort_with(context, Overloaded("too many calls without a token on this connection"))
            self._running[connection] += 1
            try:
                response = await behaviour(_only(await _request(context)), context)
                if not handler.response_streaming:
                    await context.write(response)
            finally:
                self._running[connection] -= 1
                if not self._running[connection]:
                    del self._running[connection]

        return with_behaviour(handler, call, streams=True, request_deserializer=None)


async def _only(request: bytes) -> AsyncIterator[bytes]:
    yield request


async def _request(context: Context) -> Any:
    """Returns the request of a call, as bytes: `CallGuard` decodes them."""
    try:
        async with asyncio.timeout(TOKENLESS_REQUEST_S):
            raw = await context.read()
    except TimeoutError:
        await abort_with(context, DeadlineExceeded("the request did not arrive in time"))
    if not isinstance(raw, bytes):
        await abort_with(context, InvalidRequest("request", "is missing"))
    if len(raw) > MAX_TOKENLESS_REQUEST_BYTES:
        await abort_with(context, InvalidRequest("request", f"is longer than {MAX_TOKENLESS_REQUEST_BYTES} bytes"))
    return raw
