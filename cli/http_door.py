"""The HTTP door of `tandem serve --http`: OpenAI's and Anthropic's APIs, by the gateway `smg` in front of the router.

`python -m cli.http_door --listen HOST:PORT --router HOST:PORT` runs it, prints `ready HOST:PORT` once it serves the
router's model, and ends by SIGTERM when running answers are done. smg calls the router's face for vLLM's engine
protocol. It brings no token and speaks no TLS to a router, and its own port lets every caller change what it calls: so
it is for loopback, or for behind something that protects it (`--insecure`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from types import TracebackType
from urllib.error import URLError

from tandem.config import ServeConfig
from tandem.errors import ConfigError, DeadlineExceeded, Reason, Unavailable
from tandem.rpc.process import EXIT_BAD_CONFIG
from tandem.security.exposure import is_loopback

_POLL_S = 0.1
_ASK_TIMEOUT_S = 5.0
_INSTALL = "needs smg; install tandem-serving[http]"


def check_http(config: ServeConfig) -> None:
    """Raises ConfigError if `--http` cannot work with the other options."""
    if config.http is None:
        return
    security = config.router.security
    if importlib.util.find_spec("smg") is None:
        raise ConfigError("--http", _INSTALL)
    if security.tls_cert or security.token_file:
        raise ConfigError("--http", "smg can bring neither a token nor TLS to the router: leave these options out")
    if not is_loopback(config.http) and not security.insecure:
        raise ConfigError("--http", f"{config.http} is beyond loopback and asks nobody who it is; --insecure allows it")


class HttpHealth:
    """Asks an HTTP door whether it lives: a `cli.liveness.HealthClient`."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def __aenter__(self) -> HttpHealth:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    async def serving(self, service: str, *, timeout_s: float) -> bool:
        """Whatever the `service`. Raises Unavailable, DeadlineExceeded."""
        try:
            return await asyncio.to_thread(_answers, self._address, "/liveness", timeout_s) is not None
        except TimeoutError:
            raise DeadlineExceeded(f"{self._address} gives no answer") from None
        except OSError as error:
            raise Unavailable(str(error), Reason.PEER_LOST) from error


def main() -> None:
    """Runs until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m cli.http_door", description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--router", required=True)
    options = parser.parse_args()
    if importlib.util.find_spec("smg") is None:
        print(f"tandem: --http: {_INSTALL}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    host, _, port = options.listen.rpartition(":")
    address = f"{host}:{int(port) or _free_port(host)}"
    stdout = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the gateway prints is log
    threading.Thread(target=_tell_when_ready, args=(address, stdout), daemon=True).start()
    _run_gateway(address, options.router)


def _run_gateway(address: str, router: str) -> None:
    """In this process: signals reach it."""
    from smg.cli import main as smg

    host, _, port = address.rpartition(":")
    sys.argv = [
        *("smg", "launch", "--host", host.strip("[]"), "--port", port),
        *("--worker-urls", f"grpc://{router}", "--backend", "vllm", "--history-backend", "none"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port("127.0.0.1")), "--log-level", "warn"),
    ]
    smg()


def _tell_when_ready(address: str, stdout: int) -> None:
    while not _has_model(address):
        time.sleep(_POLL_S)
    os.write(stdout, f"ready {address}\n".encode())


def _has_model(address: str) -> bool:
    """Whether the gateway knows a model and its tokenizer, which comes later: until then it refuses requests."""
    try:
        models = json.loads(_answers(address, "/v1/models", _ASK_TIMEOUT_S) or b"{}").get("data")
        if not models:
            return False
        text = json.dumps({"model": models[0]["id"], "prompt": "a"}).encode()
        return _answers(address, "/v1/tokenize", _ASK_TIMEOUT_S, text) is not None
    except OSError:
        return False


def _answers(address: str, path: str, timeout_s: float, body: bytes | None = None) -> bytes | None:
    """The body of an answer 200, else None; a JSON `body` is posted. Raises OSError, TimeoutError among them."""
    request = urllib.request.Request(f"http://{address}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.request.HTTPError:
        return None
    except URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else OSError(str(error.reason)) from error


def _free_port(host: str) -> int:
    with socket.create_server((host.strip("[]"), 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
