"""Which request to the admin port gets which answer. Read-only; knows no sockets.

    GET /             a page to look at           GET /livez    the process does what it is there for
    GET /status.json  what the page shows         GET /readyz   it can serve now
    GET /metrics      Prometheus' text format     GET /targets  Prometheus' HTTP service discovery (routers)

Probes need no token, since a kubelet has none, and tell no more than yes or no.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.resources import files

from aiohttp import web

from tandem.admin.content import AdminContent, ScrapeTarget
from tandem.admin.hosts import Hosts
from tandem.security.tokens import Tokens
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "tandem",
    "X-Content-Type-Options": "nosniff",
}
"""On every answer."""
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Site:
    """Answers requests from one process's content."""

    def __init__(self, content: AdminContent, hosts: Hosts, tokens: Tokens | None) -> None:
        """Reads the page's files."""
        self._content = content
        self._hosts = hosts
        self._tokens = tokens
        self._probes: dict[str, Callable[[], bool]] = {
            "/livez": lambda: content.health.alive,
            "/readyz": lambda: content.health.serving,
        }
        self._routes: dict[str, Callable[[], web.Response]] = {
            **{path: _static(*page) for path, page in _PAGE.items()},
            "/status.json": self._status,
            "/metrics": self._metrics,
        }
        if content.targets is not None:
            self._routes["/targets"] = self._targets

    async def handle(self, request: web.Request) -> web.Response:
        """The answer to one request; 500 without the reason where this process has a bug."""
        try:
            return self.answer(request)
        except Exception:  # noqa: BLE001
            _log.exception("admin port: a request failed", path=request.path)
            return _plain(500, "it failed; the log says why")

    def answer(self, request: web.BaseRequest) -> web.Response:
        """Judges in this order: name, method, probe, token, path."""
        if not self._hosts.allows(request.headers.get("Host")):
            return _plain(421, "this port does not answer to that name")
        if request.method not in {"GET", "HEAD"}:
            return _plain(405, "read-only", {"Allow": "GET, HEAD"})
        if request.path in self._probes:
            return _plain(200, "ok") if self._probes[request.path]() else _plain(503, "not ok")
        if self._tokens is not None and not self._tokens.allows(request.headers.get("Authorization")):
            return _plain(401, "a token is needed", {"WWW-Authenticate": 'Basic realm="tandem", charset="UTF-8"'})
        route = self._routes.get(request.path)
        return _plain(404, "no such page") if route is None else route()

    def _status(self) -> web.Response:
        return _json(asdict(self._content.report()))

    def _metrics(self) -> web.Response:
        return _response(200, *self._content.metrics())

    def _targets(self) -> web.Response:
        assert self._content.targets is not None
        return _json([_target(each) for each in self._content.targets() if each.address])


def _target(target: ScrapeTarget) -> object:
    labels = {"role": target.role} | ({"worker_id": target.worker_id} if target.worker_id else {})
    return {"targets": [target.address], "labels": labels}


def _static(name: str, content_type: str) -> Callable[[], web.Response]:
    body = files("tandem.admin").joinpath("page", name).read_bytes()
    return lambda: _response(200, body, content_type)


def _json(value: object) -> web.Response:
    return _response(200, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), _JSON)


def _plain(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return _response(status, f"{text}\n".encode(), _TEXT, headers)


def _response(status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, headers={**HEADERS, "Content-Type": content_type, **(headers or {})})
