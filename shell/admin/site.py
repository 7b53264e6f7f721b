"""Which request to the admin port gets which answer. Read-only; knows no sockets.

    GET /             a page to look at           GET /livez    the process does what it is there for
    GET /status.json  what the page shows         GET /readyz   it can serve now
    GET /history.json the last half hour of it    GET /metrics  for Prometheus
    GET /targets      Prometheus' HTTP service discovery (routers)

Probes need no token, since a kubelet has none, and tell no more than yes or no.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.resources import files

from aiohttp import web

from shell.admin.content import AdminContent, ScrapeTarget
from shell.telemetry.logging import get_logger
from tandem.security.exposure import is_loopback
from tandem.security.tokens import Tokens

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
    "/tables.js": ("tables.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Site:
    """Answers requests from a process's content."""

    def __init__(self, content: AdminContent, listen: str, tokens: Tokens | None) -> None:
        """`listen`: HOST:PORT of the port. Reads the page's files."""
        self._own_names = frozenset({"localhost", _host_of(listen)}) if is_loopback(listen) else None
        self._tokens = tokens
        self._probes: dict[str, Callable[[], bool]] = {
            "/livez": lambda: content.health.alive,
            "/readyz": lambda: content.health.serving,
        }
        self._routes: dict[str, Callable[[str], web.Response]] = {
            **{path: _static(*page) for path, page in _PAGE.items()},
            "/status.json": lambda _: _json(asdict(content.report())),
            "/history.json": lambda _: _json(content.history()),
            "/metrics": lambda accept: _response(200, *content.metrics(accept)),
        }
        targets = content.targets
        if targets is not None:
            self._routes["/targets"] = lambda _: _json([_target(each) for each in targets() if each.address])

    async def handle(self, request: web.Request) -> web.Response:
        """The answer to one request; 500 without the reason where this process has a bug."""
        try:
            return self.answer(request)
        except Exception:  # noqa: BLE001
            _log.exception("admin port: a request failed", path=request.path)
            return _plain(500, "it failed; the log says why")

    def answer(self, request: web.BaseRequest) -> web.Response:
        """Judges in this order: name, method, probe, token, path."""
        if not _is_own_name(_host_of(request.headers.get("Host", "")), self._own_names):
            return _plain(421, "this port does not answer to that name")
        if request.method not in {"GET", "HEAD"}:
            return _plain(405, "read-only", {"Allow": "GET, HEAD"})
        if request.path in self._probes:
            return _plain(200, "ok") if self._probes[request.path]() else _plain(503, "not ok")
        if self._tokens is not None and not self._tokens.allows(request.headers.get("Authorization")):
            return _plain(401, "a token is needed", {"WWW-Authenticate": 'Basic realm="tandem", charset="UTF-8"'})
        route = self._routes.get(request.path)
        return _plain(404, "no such page") if route is None else route(request.headers.get("Accept", ""))


def _is_own_name(name: str, own_names: frozenset[str] | None) -> bool:
    """Whether a port with these names answers to the `Host` called `name`, whatever its port, which tunnels change.

    On loopback only to its own. Else a page anywhere could let its own name point at 127.0.0.1 and read this
    port through a visitor's browser (DNS rebinding). A port that is open to others is reached by names that it cannot
    know (None); there, the token is what keeps strangers out.
    """
    if own_names is None or name in own_names:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host_of(address: str) -> str:
    """The host of `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`."""
    if address.startswith("["):
        return address[1:].partition("]")[0].lower()
    return address.partition(":")[0].lower()


def _target(target: ScrapeTarget) -> object:
    labels = {"role": target.role} | ({"worker_id": target.worker_id} if target.worker_id else {})
    return {"targets": [target.address], "labels": labels}


def _static(name: str, content_type: str) -> Callable[[str], web.Response]:
    body = files("shell.admin").joinpath("page", name).read_bytes()
    return lambda _: _response(200, body, content_type)


def _json(value: object) -> web.Response:
    return _response(200, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), _JSON)


def _plain(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return _response(status, f"{text}\n".encode(), _TEXT, headers)


def _response(status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, headers={**HEADERS, "Content-Type": content_type, **(headers or {})})
