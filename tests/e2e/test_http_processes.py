"""HTTP over several routers on one port, and at the end of `tandem serve`."""

from __future__ import annotations

import json
import signal
import socket
import threading
import urllib.request
from typing import Any

from bench.support.cluster import serve
from tests.http_address import http_address

BODY = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}


def post(address: str, body: Any) -> Any:
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


def test_routers_share_the_port_and_a_stream_outlives_the_order_to_stop() -> None:
    with serve("demo", "--router-processes", "2", "--http", "127.0.0.1:0") as cluster:
        address = http_address(cluster)
        for _ in range(8):  # each on a connection of its own
            with post(address, {**BODY, "max_tokens": 2, "stream": False}) as answer:
                assert json.loads(answer.read())["usage"]["completion_tokens"] == 2
        with post(address, BODY) as stream:
            first = stream.readline()
            threading.Timer(0, cluster.process.send_signal, (signal.SIGTERM,)).start()
            rest = stream.read()
        assert first.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in rest
        assert cluster.process.wait(60) == 0


def test_routers_start_on_a_port_that_callers_have_just_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        address = f"127.0.0.1:{before.getsockname()[1]}"
        with socket.create_connection(before.getsockname()):
            before.accept()[0].close()  # whoever closes first keeps the port for a minute
    with serve("demo", "--router-processes", "2", "--http", address) as cluster:
        assert http_address(cluster) == address
