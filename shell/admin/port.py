"""The admin port: aiohttp's server around the site, plain or TLS.

Bounds for callers without a token: a request must be read within `_IDLE_S` of connecting, and its head is small.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from shell.admin.content import AdminContent
from shell.admin.site import Site
from shell.http.silent import SILENT
from shell.rpc.address import advertised_admin_address
from shell.telemetry.logging import get_logger
from tandem.errors import ConfigError
from tandem.security.credentials import Incoming

_log = get_logger(__name__)

_IDLE_S = 10.0
"""A connection that waits for a request, its first one or the rest of one, is closed after this time."""
_MAX_LINE_BYTES = 2048
_MAX_FIELD_BYTES = 4096
_STOP_S = 1.0


@asynccontextmanager
async def admin_port(
    listen: str | None,
    content: AdminContent,
    incoming: Incoming,
    advertise: str | None = None,
    *,
    falls_back: bool = False,
) -> AsyncIterator[str]:
    """Serves while inside; gives the HOST:PORT at which it is reached, empty if `listen` is None.

    `advertise` is the process's own `--advertise`: where `listen` is a wildcard, its host is the one reported.
    `falls_back`: whether any free port will do where another process has this one. Raises ConfigError if the address
    cannot be had.
    """
    if listen is None:
        yield ""
        return
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", Site(content, listen, incoming.tokens).handle)
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=SILENT,
        keepalive_timeout=_IDLE_S,
        lingering_time=0.0,
        max_line_size=_MAX_LINE_BYTES,
        max_field_size=_MAX_FIELD_BYTES,
        shutdown_timeout=_STOP_S,
    )
    await runner.setup()
    try:
        address = advertised_admin_address(listen, advertise, await _listen(runner, listen, incoming, falls_back))
        _log.info("admin port", address=address)
        yield address
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, listen: str, incoming: Incoming, falls_back: bool) -> int:
    """Returns the port."""
    host, _, port = listen.rpartition(":")
    context = None if incoming.tls is None else incoming.tls.serving_context()
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=context).start()
    except OSError as error:
        if falls_back and error.errno == errno.EADDRINUSE:
            _log.info("admin port: another process has the default one, so it is any free one", taken=listen)
            return await _listen(runner, f"{host}:0", incoming, falls_back=False)
        raise ConfigError("--admin-listen", f"cannot listen on {listen}: {error.strerror or error}") from error
    return int(runner.addresses[0][1])
