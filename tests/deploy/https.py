"""One request over HTTPS to a process whose certificate is for `tandem`, whatever its address."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from pathlib import Path

TIMEOUT_S = 120.0


def ask(address: str, path: str, authority: Path, token: str, body: object | None = None) -> bytes:
    """Returns the answer to GET, or to POST where there is a body. Raises RuntimeError unless it is 200."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port))
    plain = socket.create_connection((host, int(port)), TIMEOUT_S)
    connection.sock = ssl.create_default_context(cafile=authority).wrap_socket(plain, server_hostname="tandem")
    try:
        data = None if body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{address}{path}: {response.status} {answer.decode()}")
        return answer
    finally:
        connection.close()
