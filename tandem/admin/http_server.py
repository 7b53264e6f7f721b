"""HTTP/1.1 for the admin port: aiohttp reads the requests of connections that the front door hands over.

One request per connection: whoever stays longer than one answer takes is nobody that belongs here.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from tandem.admin.site import HEADERS, Answer, Ask, Site
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)

_MAX_LINE_BYTES = 2048
_MAX_FIELD_BYTES = 4096
_STOP_S = 1.0


class HttpServer:
    """Owns aiohttp's side. `handler` makes the protocol of one connection."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._server = web.Server(
            self._handle,
            access_log=None,
            lingering_time=0.0,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
        )

    def handler(self) -> asyncio.Protocol:
        """For one connection."""
        return self._server()

    async def stop(self) -> None:
        """Ends every handler."""
        await self._server.shutdown(_STOP_S)

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        ask = Ask(request.method, request.path, request.headers.get("Host"), request.headers.get("Authorization"))
        try:
            answer = self._site.answer(ask)
        except Exception:  # noqa: BLE001  the root of a request
            _log.exception("admin port: a request failed", path=ask.path)
            answer = Answer(500, "text/plain; charset=utf-8", b"it failed; the log says why\n")
        response = web.Response(status=answer.status, body=answer.body)
        response.headers.update(HEADERS)
        response.headers.update(answer.headers)
        response.headers["Content-Type"] = answer.content_type
        response.force_close()
        return response
