"""The HTTP side of the admin port: which request gets which answer. Read-only; knows no sockets.

    GET /             a page to look at           GET /livez    the process does what it is there for
    GET /status.json  what the page shows         GET /readyz   it can serve now
    GET /metrics      Prometheus' text format     GET /targets  Prometheus' HTTP service discovery (routers)

Probes need no token, for whoever asks them has none, and tell no more than yes or no.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files

from tandem.admin.content import AdminContent, ScrapeTarget
from tandem.admin.hosts import Hosts
from tandem.security.tokens import Tokens

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


@dataclass(frozen=True, slots=True)
class Ask:
    """What of an HTTP request counts here."""

    method: str
    path: str
    host: str | None
    authorization: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """`headers` are on top of HEADERS."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


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
        self._routes: dict[str, Callable[[], Answer]] = {
            **{path: _static(*page) for path, page in _PAGE.items()},
            "/status.json": self._status,
            "/metrics": self._metrics,
        }
        if content.targets is not None:
            self._routes["/targets"] = self._targets

    def answer(self, ask: Ask) -> Answer:
        """Judges in this order: name, method, probe, token, path."""
        if not self._hosts.allows(ask.host):
            return _plain(421, "this port does not answer to that name")
        if ask.method not in {"GET", "HEAD"}:
            return _plain(405, "read-only", {"Allow": "GET, HEAD"})
        if ask.path in self._probes:
            return _plain(200, "ok") if self._probes[ask.path]() else _plain(503, "not ok")
        if self._tokens is not None and not self._tokens.allows(ask.authorization):
            return _plain(401, "a token is needed", {"WWW-Authenticate": 'Basic realm="tandem", charset="UTF-8"'})
        route = self._routes.get(ask.path)
        return _plain(404, "no such page") if route is None else route()

    def _status(self) -> Answer:
        return _json(asdict(self._content.report()))

    def _metrics(self) -> Answer:
        body, content_type = self._content.metrics()
        return Answer(200, content_type, body)

    def _targets(self) -> Answer:
        assert self._content.targets is not None
        return _json([_target(each) for each in self._content.targets() if each.address])


def _target(target: ScrapeTarget) -> object:
    labels = {"role": target.role} | ({"worker_id": target.worker_id} if target.worker_id else {})
    return {"targets": [target.address], "labels": labels}


def _static(name: str, content_type: str) -> Callable[[], Answer]:
    answer = Answer(200, content_type, files("tandem.admin").joinpath("page", name).read_bytes())
    return lambda: answer


def _json(value: object) -> Answer:
    return Answer(200, _JSON, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def _plain(status: int, text: str, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, _TEXT, f"{text}\n".encode(), headers or {})
