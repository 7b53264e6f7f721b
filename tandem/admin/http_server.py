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
_TEXT = "text/plain; charset=utf-8"


class HttpServer:
    """Owns aiohttp's side. `handler` makes the protocol of one connection."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._server = web.Server(self._handle)

    def handler(self) -> asyncio.Protocol:
        """For one connection."""
        return _Handler(
            self._server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None = none
            lingering_time=0.0,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
        )

    async def stop(self) -> None:
        """Ends every handler."""
        await self._server.shutdown(_STOP_S)

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        ask = Ask(request.method, request.path, request.headers.get("Host"), request.headers.get("Authorization"))
        return _response(self._site.answer(ask))


class _Handler(web.RequestHandler):
    """Says nothing of its own where a request fails: aiohttp's would repeat what came, and log it with a stack."""

    async def start(self) -> None:
        """Runs as the connection's task."""
        try:
            await super().start()
        except ValueError:  # a host in the request line that is no name, which aiohttp does not expect
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be read (400), or where the site failed (500)."""
        del exc, message
        if status < 500:
            return _response(Answer(status, _TEXT, b"not a request that this port understands\n"))
        _log.exception("admin port: a request failed", path=request.path)
        return _response(Answer(status, _TEXT, b"it failed; the log says why\n"))


def _response(answer: Answer) -> web.Response:
    response = web.Response(status=answer.status, body=answer.body)
    response.headers.update(HEADERS)
    response.headers.update(answer.headers)
    response.headers["Content-Type"] = answer.content_type
    response.force_close()
    return response
