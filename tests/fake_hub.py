"""A hub on loopback with the few answers that huggingface_hub asks for: info, tree, and files by commit."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
_NAME = "X-Name"


@dataclass
class FakeHub:
    """`files` by repository, each the folder that it holds; `refused`: a repository's status and error code."""

    files: Mapping[str, Path]
    refused: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    token: str | None = None
    """What callers must bring, if any."""
    url: str = ""
    sent: list[str] = field(default_factory=list)
    """Files that were sent, in order."""

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Returns variables for a process that fetches from this hub into the folder `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "", **more}


@contextmanager
def fake_hub(
    files: Mapping[str, Path], refused: Mapping[str, tuple[int, str]] | None = None, token: str | None = None
) -> Iterator[FakeHub]:
    """Serves until the block ends."""
    hub = FakeHub(files, refused or {}, token)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, format: str, *args: object) -> None:
            """Keeps stderr clean."""

        def _answer(self, *, with_body: bool) -> None:
            status, headers, body = _answer(hub, unquote(urlsplit(self.path).path), self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)
                hub.sent += [name] if (name := headers.get(_NAME)) else []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(hub: FakeHub, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
    parts = path.removeprefix("/api/models").strip("/").split("/")
    repository, what, rest = "/".join(parts[:2]), *(parts[2:3] or [""]), parts[3:]
    if (refused := _refused(hub, repository, rest, authorization)) is not None:
        return refused[0], {"X-Error-Code": refused[1]}, b""
    folder = hub.files[repository]
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    if what in {"", "revision"}:
        return _json({"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})
    if what == "tree":
        sizes = {name: (folder / name).stat().st_size for name in names}
        return _json([{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes.items()])
    name = "/".join(rest[1:])
    body = (folder / name).read_bytes()
    return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT, _NAME: name}, body


def _refused(hub: FakeHub, repository: str, rest: list[str], authorization: str | None) -> tuple[int, str] | None:
    if hub.token is not None and authorization != f"Bearer {hub.token}":
        return 401, "RepoNotFound"
    if repository in hub.refused:
        return hub.refused[repository]
    if repository not in hub.files:
        return 404, "RepoNotFound"
    return (404, "RevisionNotFound") if rest and rest[0] not in {"main", "v1", COMMIT} else None


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
